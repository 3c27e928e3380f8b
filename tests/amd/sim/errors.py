"""What goes wrong inside the simulator. Semantics raise `Refused` with a reason; the machine adds where it happened."""

from __future__ import annotations


class Refused(Exception):
    """The hardware would do something undefined here, or the simulator does not know what it would do."""


class UndefinedScalar(Refused):
    """A scalar source has bits that nobody wrote. Logic may still have a defined result."""


class Unknown(Refused):
    """An instruction, an operand or a modifier without semantics in the tables."""


class SimulationError(Exception):
    """A refusal with kernel, block, wave and place in the code."""
