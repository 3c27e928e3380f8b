"""Device communicators: what a kernel has to know of the ranks, and the memory that its barriers need."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import TYPE_CHECKING

from mori import _core
from mori.cco.requirements import GDA_CONNECTION_NONE, CCODevCommRequirements
from mori.cco.resources import CCOResource

if TYPE_CHECKING:
    from mori.cco.communicator import Communicator

_SLAB_ALIGNMENT = 128
_WORD = 4


class DevCommHandle(CCOResource):
    """Collective: a device communicator with what `requirements` ask for, by default those of the dataclass.

    Kernels get `ptr`. `Communicator.create_dev_comm` makes one that the communicator closes in the end; one that is
    constructed directly is the caller's to close. Errors as for `Communicator.create_dev_comm`.
    """

    def __init__(
        self, communicator: Communicator, requirements: CCODevCommRequirements | None = None, *, tracked: bool = False
    ) -> None:
        self.requirements = dataclasses.replace(requirements or CCODevCommRequirements())
        wanted = self.requirements.values()
        ranks = communicator.nranks
        offset, places = 0, []
        for count in (wanted["lsa_barrier_count"], wanted["barrier_count"]):
            places.append((offset, count))
            # An epoch for each barrier, then a word from every rank for each.
            offset += -(-count * (1 + ranks) * _WORD // _SLAB_ALIGNMENT) * _SLAB_ALIGNMENT
        what = "create_dev_comm"
        self._slabs = communicator.allocate_symmetric(offset, what, wanted, tracked=False)
        try:
            if offset:
                communicator._memory.zero(self._slabs.offset, offset)
                communicator.allgather(None, f"{what}: ready")  # before that no peer may arrive at a barrier
            descriptor = self._describe(communicator, offset, places)
            self._address = communicator._area.add_communicator(descriptor)
        except BaseException:
            self._slabs.close()
            raise
        self._host_copy = ctypes.create_string_buffer(descriptor, len(descriptor))
        super().__init__(communicator, tracked)

    def _describe(self, communicator: Communicator, size: int, places: list[tuple[int, int]]) -> bytes:
        return bytes(
            _core.cco_device_communicator(
                rank=communicator.rank,
                ranks=communicator.nranks,
                base=communicator._memory.base,
                stride=communicator._memory.bytes_per_rank,
                windows=communicator._area.windows,
                control=communicator._native.control,
                resource_offset=self._slabs.offset,
                resource_bytes=size,
                barriers=places[0],
                hybrid_barriers=places[1],
            )
        )

    @property
    def ptr(self) -> int:
        """Address of the descriptor (`ccoDevComm`), in memory of the communicator's device."""
        self._check()
        return self._address

    @property
    def host_ptr(self) -> int:
        """Address of a copy of the descriptor in memory of the host."""
        self._check()
        return ctypes.addressof(self._host_copy)

    @property
    def rank(self) -> int:
        self._check()
        return self._communicator.rank

    @property
    def world_size(self) -> int:
        self._check()
        return self._communicator.nranks

    @property
    def lsa_rank(self) -> int:
        """Position among the ranks whose memory this one reaches by load and store: here, all."""
        return self.rank

    @property
    def lsa_size(self) -> int:
        return self.world_size

    @property
    def my_node_start(self) -> int:
        """World rank of the first rank of this node."""
        self._check()
        return 0

    @property
    def gda_conn_type(self) -> int:
        """How ranks of other nodes are connected: GDA_CONNECTION_NONE, for there are none."""
        self._check()
        return GDA_CONNECTION_NONE

    @property
    def flat_base(self) -> int:
        """Address in this process of rank 0's slice; that of rank p is p times `per_rank_size` further on."""
        self._check()
        return int(self._communicator._memory.base)

    @property
    def per_rank_size(self) -> int:
        """Bytes from one rank's slice to the next."""
        self._check()
        return int(self._communicator._memory.bytes_per_rank)

    def _check(self) -> None:
        super()._check()
        self._communicator._check("use a device communicator")

    def _release(self) -> None:
        self._communicator._area.remove_communicator(self._address)
        self._slabs.close()
