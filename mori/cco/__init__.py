"""Explicit communicators: a unique id, `Communicator.init`, symmetric memory and windows."""

from mori.cco.communicator import Communicator
from mori.cco.resources import AllocatedMemory, CCOResource, RegisteredWindow, communicator_of_window
from mori.cco.unique_id import UniqueId, get_unique_id

__all__ = [
    "AllocatedMemory",
    "CCOResource",
    "Communicator",
    "RegisteredWindow",
    "UniqueId",
    "communicator_of_window",
    "get_unique_id",
]
