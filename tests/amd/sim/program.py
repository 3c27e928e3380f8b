"""Instructions of a code object, from its listing, every byte of which is held against the code object.

So the text needs no trust: if the assembler's bytes are those that would be loaded, the text is what would run.
Operands that only the linker knows, and where branches lead, are taken from the code object.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from tests.amd.sim.code_object import CodeObject
from tests.amd.sim.toolchain import Compiled

LABEL = re.compile(r"^([\w.$]+):")
ENCODED = re.compile(r"^\t(?P<text>[a-z].*?)\s*(?:;[^;]*)?; encoding: \[(?P<bytes>[^\]]*)\]")
FIXUP = re.compile(r"^\s*;\s+fixup \w - offset: (?P<offset>\d+), value: (?P<value>.*), kind: (?P<kind>\w+)")
SUFFIX = re.compile(r"_(e32|e64|e32_dpp|e64_dpp|e64_dpp8|dpp8|dpp|sdwa)$")
LONE_MODIFIER = re.compile(r"^(sc[01]|nt|scope:\w+|th:\w+)$")
BETWEEN_OPERANDS = re.compile(r",\s*(?![^\[(]*[\])])")


@dataclass(frozen=True)
class Instruction:
    """`mnemonic` is without the suffix that names an encoding, which is `form`."""

    text: str
    mnemonic: str
    form: str = ""
    operands: tuple[str, ...] = ()
    modifiers: dict[str, str] = field(default_factory=dict)
    address: int = 0
    bytes: int = 0
    target: int = 0
    """Of a branch."""
    second: Instruction | None = None
    """The other half of a dual instruction."""

    @property
    def next_address(self) -> int:
        return self.address + self.bytes


class Program:
    """All code of a code object, loaded at `base`."""

    def __init__(self, compiled: Compiled, base: int) -> None:
        self.code_object = CodeObject(compiled.code_object)
        self.arch = self.code_object.arch
        self.base = base
        self.kernels = self.code_object.kernels
        self._labels: list[tuple[int, str]] = []
        found = {one.address: one for one in self._decode(compiled.listing)}
        self.instructions = [found[address] for address in sorted(found)]
        self.index_of = {one.address: index for index, one in enumerate(self.instructions)}
        self._labels.sort()
        for one in self.instructions:
            if one.target and one.target not in self.index_of:
                raise ValueError(f"{self.place(one.address)}: {one.text} leads to no instruction")

    def place(self, address: int) -> str:
        """The label before an address, and the distance from it."""
        index = bisect.bisect_right(self._labels, (address, "\uffff")) - 1
        if index < 0:
            return f"{address:#x}"
        start, name = self._labels[index]
        return f"{name}+{address - start:#x}"

    def _decode(self, listing: str) -> Iterator[Instruction]:
        symbols, end = self.code_object.symbols, None
        at, seen = None, set()
        lines = listing.splitlines()
        labels = self._label_addresses(lines)
        for number, line in enumerate(lines):
            if label := LABEL.match(line):
                name = label[1]
                if name in symbols and symbols[name].bytes:
                    at, end = symbols[name].address, symbols[name].address + symbols[name].bytes
                    seen.add(name)
                elif at is not None and at == end:
                    at = None
                if at is not None:
                    self._labels.append((self.base + at, name))
                continue
            encoded = ENCODED.match(line)
            if encoded is None or at is None or end is None:
                continue
            fixup = FIXUP.match(lines[number + 1]) if number + 1 < len(lines) else None
            one = self._check(encoded["text"], encoded["bytes"].split(","), at, fixup, labels)
            yield one
            at += one.bytes
            if at > end:
                raise ValueError(f"{one.text} reaches beyond its function")
        functions = {kernel.name for kernel in self.kernels.values()}
        if functions - seen:
            raise ValueError(f"the listing lacks {', '.join(sorted(functions - seen))}")

    def _label_addresses(self, lines: list[str]) -> dict[str, int]:
        addresses, at = {}, 0
        for line in lines:
            if label := LABEL.match(line):
                symbol = self.code_object.symbols.get(label[1])
                at = symbol.address if symbol and symbol.bytes else at
                addresses[label[1]] = at
            elif encoded := ENCODED.match(line):
                at += encoded["bytes"].count(",") + 1
        return addresses

    def _check(
        self, text: str, encoding: list[str], at: int, fixup: re.Match[str] | None, labels: dict[str, int]
    ) -> Instruction:
        loaded = self.code_object.read(at, len(encoding))
        for index, byte in enumerate(encoding):
            if byte.startswith("0x") and int(byte, 16) != loaded[index]:
                raise ValueError(f"{text}: the listing says {','.join(encoding)}, at {at:#x} is {loaded.hex(',')}")
        known = all(byte.startswith("0x") for byte in encoding)
        if known == (fixup is not None):
            raise ValueError(
                f"{text}: bytes {','.join(encoding)} and fixup {fixup and fixup[0]!r} do not belong together"
            )
        one = replace(parse(text), address=self.base + at, bytes=len(encoding))
        if fixup is None:
            return one
        if fixup["kind"] == "fixup_si_sopp_br":
            target = at + 4 + 4 * int.from_bytes(loaded[:2], "little", signed=True)
            if target != labels.get(fixup["value"]):
                raise ValueError(f"{text}: leads to {target:#x}, the label is at {labels.get(fixup['value'])}")
            return replace(one, target=self.base + target)
        offset = int(fixup["offset"])
        literal = int.from_bytes(loaded[offset:], "little")
        return replace(one, operands=tuple(hex(literal) if fixup["value"] == o else o for o in one.operands))


def parse(text: str) -> Instruction:
    """An instruction of a listing, without its place."""
    halves = [_parse_one(part) for part in text.split(" :: ")]
    return replace(halves[0], text=text, second=halves[1] if len(halves) > 1 else None)


def _parse_one(text: str) -> Instruction:
    name, _, rest = text.strip().partition(" ")
    suffix = SUFFIX.search(name)
    mnemonic = name[: suffix.start()] if suffix else name
    operands, modifiers = [], {}
    for position, chunk in enumerate(BETWEEN_OPERANDS.split(rest.strip()) if rest.strip() else []):
        first, *others = re.split(r"\s+(?![^\[(]*[\])])", chunk)
        if position == 0 and LONE_MODIFIER.match(first):
            others = [first, *others]
        else:
            operands.append(first)
        for modifier in others:
            key, _, value = modifier.partition(":")
            modifiers[key] = value
    return Instruction(text, mnemonic, suffix[1] if suffix else "", tuple(operands), modifiers)
