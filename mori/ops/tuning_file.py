"""Tuning files: JSON with facts about where rules hold, and the rules. Read with forgiveness, written with care."""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .tuning_rules import CALL_FIELDS, Rule, check_phase, fault_of, order_of

VERSION = "1.0"

_log = logging.getLogger(__name__)


class _Unusable(Exception):
    """Why a file cannot be used."""


def read_rules(path: Path, phase: str, gpu_arch: str, *, missing: int = logging.DEBUG) -> list[Rule]:
    """Rules of a file that can serve the phase, sorted for `lookup`. Empty if there is no such file, which is logged at
    level `missing`, or if it cannot be used, which is a logged warning; so is that rules of it had to be left out."""
    try:
        content = _parse(path)
        if content.get("version") != VERSION:
            raise _Unusable(f"it has version {content.get('version')!r}, this mori reads {VERSION!r}")
    except FileNotFoundError:
        _log.log(missing, "there is no tuning file %s", path)
        return []
    except (OSError, _Unusable) as reason:
        _log.warning("tuning file %s is not used: %s", path, reason)
        return []
    if content.get("gpu_arch") != gpu_arch:
        _log.warning(
            "tuning file %s was made for gpu_arch %r, this is %r: its rules are used all the same",
            path,
            content.get("gpu_arch"),
            gpu_arch,
        )
    rules = _sound(content["rules"], path, phase)
    if phase == "dispatch":
        # Rules of combine hold all that dispatch needs; in a file of both phases each has its own.
        rules = [rule for rule in rules if fault_of(rule, "combine")] or rules
    return sorted(rules, key=order_of(phase))


def save_rule(path: str | os.PathLike[str], metadata: Mapping[str, Any], entry: Rule, phase: str) -> None:
    """See `TuningConfigManager.save_tuning_result`."""
    path = Path(os.path.realpath(path))  # a link stays one
    if fault := fault_of(entry, check_phase(phase)):
        raise ValueError(f"this {phase} rule would never be read, {fault}: {entry!r}")
    rules, replaced = [], None
    for rule in _sound(_existing_rules(path), path, "dispatch"):
        # Compared in all fields, so that a rule for dispatch leaves those of combine in its file alone.
        if _key(rule, "combine") == _key(entry, "combine"):
            replaced = rule
        else:
            rules.append(rule)
    rules = sorted([*rules, entry], key=order_of(phase))
    facts = {name: value for name, value in metadata.items() if name not in ("version", "rules")}
    _write(path, json.dumps({"version": VERSION, **facts, "phase": phase, "rules": rules}, indent=2) + "\n")
    print(_report(phase, _key(entry, phase), replaced, entry))


def _parse(path: Path) -> dict[str, Any]:
    """FileNotFoundError and other OSErrors as they come, _Unusable for what is no tuning file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise _Unusable(f"it is no JSON ({error})") from None
    if not isinstance(content, dict) or not isinstance(content.get("rules"), list):
        raise _Unusable('it is no object with an array "rules"')
    return content


def _sound(rules: list[Any], path: Path, phase: str) -> list[Rule]:
    """The rules that can serve the phase, with one warning if there are others."""
    faults = {place: fault for place, rule in enumerate(rules) if (fault := fault_of(rule, phase))}
    if faults:
        place, fault = next(iter(faults.items()))
        _log.warning(
            "%d of %d rules of tuning file %s cannot serve %s and are left out; the first is rule %d: %s",
            len(faults),
            len(rules),
            path,
            phase,
            place,
            fault,
        )
    return [rule for place, rule in enumerate(rules) if place not in faults]


def _existing_rules(path: Path) -> list[Any]:
    try:
        content = _parse(path)
    except FileNotFoundError:
        return []
    except _Unusable as reason:
        _log.warning("tuning file %s is written anew: %s", path, reason)
        return []
    version = content.get("version", VERSION)
    if version != VERSION:
        raise ValueError(
            f"tuning file {path} has version {version!r}, this mori writes {VERSION!r}: save to another file"
        )
    return list(content["rules"])


def _key(rule: Rule, phase: str) -> tuple[Any, ...]:
    return tuple(rule.get(name) for name in CALL_FIELDS[phase])


def _write(path: Path, text: str) -> None:
    """Whole or not at all, whoever reads or writes meanwhile: of two that write at once, the later one's file stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


# ---- what is printed about a saved rule


def _report(phase: str, key: tuple[Any, ...], old: Rule | None, new: Rule) -> str:
    lines = [f"{'ADDED' if old is None else 'REPLACED'} {phase} rule {key}"]
    change = _sizes(new) if old is None else f"{_sizes(old)} -> {_sizes(new)}"
    lines.append(f"  config:  {change} (block_num/rdma_block_num/warp_per_block)")
    latency = "avg_latency_us" if "avg_latency_us" in new else "latency_us"
    lines += _compared("latency:", latency, "us", old, new, ("better", "worse"))
    lines += _compared("bw:     ", "bandwidth_gbps", "GB/s", old, new, ())
    return "\n".join(f"[mori-tuning] {line}" for line in lines)


def _sizes(rule: Rule) -> str:
    return f"{rule['block_num']}/{rule['rdma_block_num']}/{rule['warp_per_block']}"


def _compared(label: str, field: str, unit: str, old: Rule | None, new: Rule, words: tuple[str, ...]) -> list[str]:
    """The line for a measured number; none where the new rule has no such number. `words`: for less and for more."""
    after, before = new.get(field), (old or {}).get(field)
    if not isinstance(after, (int, float)):
        return []
    if not isinstance(before, (int, float)):
        return [f"  {label} {after:.2f} {unit}"]
    line = f"  {label} {before:.2f} -> {after:.2f} {unit}"
    metrics = [rule.get("bandwidth_metric") for rule in (old or {}, new)]
    if field == "bandwidth_gbps" and metrics[0] != metrics[1]:
        return [f"{line} (not comparable: bandwidth_metric {metrics[0]} -> {metrics[1]})"]
    if before > 0:
        word = f", {words[after > before]}" if words and after != before else ""
        line += f" ({100 * (after - before) / before:+.1f}%{word})"
    return [line]
