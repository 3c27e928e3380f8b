// Teams of any topology, asked from Python.
#include <mori/cco.hpp>

using namespace mori;
using namespace mori::cco;

namespace {

constexpr bool constant = sizeof(ccoWindow) == 32 && sizeof(ccoWindowTable) == 8 + 32 * ccoMaxWindows;
static_assert(constant, "descriptors have no gaps");

ccoDevComm topology(i32 world, i32 lsa, i32 rank) {
  ccoDevComm comm{};
  comm.worldSize = u32(world);
  comm.lsaSize = u32(lsa);
  comm.rank = u32(rank);
  comm.lsaRank = u32(rank % lsa);
  comm.myNodeStart = u32(rank / lsa * lsa);
  return comm;
}

}  // namespace

// Team `which` of the rank into `members`: size, own position, then world ranks. 0: world, 1: LSA, 2: cross-node, 3: rail.
extern "C" __attribute__((visibility("default"))) void team_of(i32 world, i32 lsa, i32 rank, i32 which, i32* members) {
  const ccoDevComm comm = topology(world, lsa, rank);
  const ccoTeam teams[] = {ccoTeamWorld(comm), ccoTeamLsa(comm), ccoTeamCrossNode(comm), ccoTeamRail(comm)};
  const ccoTeam& team = teams[which];
  members[0] = team.nRanks;
  members[1] = team.rank;
  for (i32 i = 0; i < team.nRanks; ++i) members[2 + i] = ccoTeamRankToWorld(comm, team, i);
}

extern "C" __attribute__((visibility("default"))) bool is_compatible(u32 version, u32 bytes) {
  ccoDevComm comm{};
  comm.version = version;
  comm.bytes = bytes;
  return ccoIsCompatible(comm);
}
