"""What a device communicator is asked to have."""

from __future__ import annotations

from dataclasses import dataclass, fields

from mori.cco.whole import whole

GDA_CONNECTION_NONE = 0
GDA_CONNECTION_FULL = 1
GDA_CONNECTION_CROSSNODE = 2
GDA_CONNECTION_RAIL = 3

_MOST = 1 << 16  # of anything that is counted
_LEAST = {"gda_traffic_class": -1}


@dataclass
class CCODevCommRequirements:
    """Attributes may be set at any time before `Communicator.create_dev_comm`, which must find the same on all ranks.

    `lsa_barrier_count` barriers among the ranks of a node, each for a group of threads at a time; `barrier_count` more
    that would reach over nodes too. The other fields are about connections between nodes: on one node there are
    none, so they are checked, compared and without effect.
    """

    gda_connection_type: int = GDA_CONNECTION_CROSSNODE
    gda_context_count: int = 4
    gda_signal_count: int = 16
    gda_counter_count: int = 16
    gda_queue_depth: int = 0
    gda_traffic_class: int = -1
    lsa_barrier_count: int = 0
    rail_gda_barrier_count: int = 0
    sdma_queue_count: int = 0
    barrier_count: int = 0

    def values(self) -> dict[str, int]:
        """Every field, checked. TypeError for what is no int, ValueError for what is out of range."""
        found = {}
        for field in fields(self):
            value = whole(getattr(self, field.name), field.name)
            least = _LEAST.get(field.name, 0)
            most = GDA_CONNECTION_RAIL if field.name == "gda_connection_type" else _MOST
            if not least <= value <= most:
                raise ValueError(f"{field.name} must be between {least} and {most}, got {value}")
            found[field.name] = value
        return found
