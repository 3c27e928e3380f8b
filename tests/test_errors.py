"""The exception types: what they are, what they say, what survives a process boundary."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from mori import errors


@pytest.mark.parametrize(
    "kind, bases",
    [
        (errors.MoriError, (RuntimeError,)),
        (errors.PeerLost, (errors.MoriError,)),
        (errors.PeerTimeout, (errors.MoriError, TimeoutError)),
        (errors.OutOfStep, (errors.MoriError,)),
        (errors.ReceiveOverflow, (errors.CallFault, errors.MoriError)),
        (errors.RowMismatch, (errors.CallFault, errors.MoriError)),
        (errors.ConfigMismatch, (errors.MoriError, ValueError)),
        (errors.BootstrapTimeout, (errors.BootstrapError, errors.MoriError, TimeoutError)),
        (errors.HeapExhausted, (errors.MoriError,)),
        (errors.NotInitialized, (errors.MoriError,)),
        (errors.UnsupportedDtype, (TypeError, KeyError)),
        (errors.CallFaultWarning, (RuntimeWarning,)),
    ],
)
def test_hierarchy(kind: type[Exception], bases: tuple[type, ...]) -> None:
    assert all(issubclass(kind, base) for base in bases)
    assert str(kind("a plain message")) == "a plain message"


def test_faults_of_one_call_are_told_from_a_lost_communicator() -> None:
    for lost in (errors.PeerLost, errors.PeerTimeout, errors.OutOfStep):
        assert not issubclass(lost, errors.CallFault)


PEER = {"peer": 3, "phase": "dispatch", "host": "node7", "pid": 4711, "reason": "left the communicator"}
LATE = {"peer": 1, "phase": "combine", "expected": 12, "seen": 11}


@pytest.mark.parametrize(
    "error, attributes",
    [
        (errors.PeerLost(**PEER), PEER),
        (errors.PeerLost("own words", **PEER), PEER),
        (errors.PeerTimeout(**LATE), LATE),
        (errors.BootstrapTimeout("late", missing=(1, 2)), {"missing": (1, 2)}),
        (errors.UnsupportedDtype("float64 is not served"), {}),
    ],
)
def test_pickling_keeps_message_and_attributes(error: Exception, attributes: dict[str, Any]) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error) and str(copy) == str(error)
    for each in (error, copy):
        assert vars(each) == attributes


def test_composed_messages_name_everything_known() -> None:
    text = str(errors.PeerLost(**PEER))
    assert text.startswith("rank 3 (pid 4711, node7) left the communicator during dispatch; ")
    assert str(errors.PeerLost()).startswith("a peer rank died; ")
    text = str(errors.PeerTimeout(**LATE))
    assert "rank 1 is alive but did not arrive in combine" in text and "expected 12, seen 11" in text
    assert "MORI_TIMEOUT_S" in text
