"""All interleavings of a small model of the exchange's slots, blanks and waits (kernels/csrc/protocol.h, SLOTS).

A rank runs its calls one after the other; within a call its stores, reads and blanks happen in any order, except that a
word is blanked by the thread that read it. A call ends when all of them have happened: that is the kernel boundary. A
word holds BLANK or the number of the call it was sent in. Wrong are: a store over a word that is not blank, a read of
another call's word, and a state in which nobody can go on.
"""

import dataclasses
from collections.abc import Iterator

import pytest

BLANK = -1


@dataclasses.dataclass(frozen=True)
class Protocol:
    """What is varied: the real protocol is the default.

    Attributes:
      ranks: group size.
      calls: each rank makes.
      slots: of a workspace.
      words: of a row; each is stored and polled on its own.
      blanks: whether a reader blanks what it has read.
      idle: ranks that no peer sends anything to, and that therefore wait for no one.
      period: call numbers are taken modulo this.
    """

    ranks: int
    calls: int
    slots: int = 2
    words: int = 1
    blanks: bool = True
    idle: frozenset[int] = frozenset()
    period: int = 4

    def slot(self, call: int) -> int:
        return call % self.period % self.slots

    def operations(self, rank: int) -> tuple:
        """Of one call: ("store", receiver, word) and ("read" then "blank", source, word)."""
        peers = [peer for peer in range(self.ranks) if peer != rank]
        stores = [("store", peer, word) for peer in peers if peer not in self.idle for word in range(self.words)]
        reads = [] if rank in self.idle else [("read", peer, word) for peer in peers for word in range(self.words)]
        return tuple(stores + reads)


class WrongError(AssertionError):
    """An interleaving that breaks the protocol."""


def steps(protocol: Protocol, state) -> Iterator[tuple]:
    """States after `state` = (per rank (call, operations left), memory {(owner, slot, source, word): content})."""
    ranks, memory = state
    memory_now = dict(memory)
    for rank, (call, left) in enumerate(ranks):
        slot = protocol.slot(call)
        for operation in left:
            kind, peer, word = operation
            owner, source = (peer, rank) if kind == "store" else (rank, peer)
            place = (owner, slot, source, word)
            content = memory_now.get(place, BLANK)
            rest = left - {operation}
            after = dict(memory_now)
            if kind == "store":
                if protocol.blanks and content != BLANK:
                    raise WrongError(f"rank {rank} in call {call} overwrites a word of call {content} at rank {owner}")
                after[place] = call
            elif kind == "read":
                if content == BLANK:
                    continue  # polls on
                if content != call:
                    raise WrongError(f"rank {rank} in call {call} takes a word of call {content} from rank {source}")
                if protocol.blanks:
                    rest |= {("blank", peer, word)}
            else:
                after.pop(place)
            here = (call, rest) if rest else (call + 1, begun(protocol, rank, call + 1))
            yield (*ranks[:rank], here, *ranks[rank + 1 :]), frozenset(after.items())


def begun(protocol: Protocol, rank: int, call: int) -> frozenset:
    return frozenset(protocol.operations(rank)) if call < protocol.calls else frozenset()


def explore(protocol: Protocol) -> int:
    """Number of reachable states.

    Raises:
      WrongError: some interleaving goes wrong.
    """
    start = (tuple((0, begun(protocol, rank, 0)) for rank in range(protocol.ranks)), frozenset())
    seen, waiting = {start}, [start]
    while waiting:
        state = waiting.pop()
        following = list(steps(protocol, state))
        if not following and any(left for _, left in state[0]):
            raise WrongError("nobody can go on")
        for new in following:
            if new not in seen:
                seen.add(new)
                waiting.append(new)
    return len(seen)


@pytest.mark.parametrize(
    "protocol",
    [
        Protocol(ranks=2, calls=6),
        Protocol(ranks=2, calls=4, words=2),
        Protocol(ranks=3, calls=4),
        Protocol(ranks=2, calls=9, period=2),  # call numbers that wrap at every second call
    ],
    ids=str,
)
def test_two_slots_hold(protocol):
    assert explore(protocol) > 50


@pytest.mark.parametrize(
    ("protocol", "why"),
    [
        (Protocol(ranks=2, calls=2, slots=1), "overwrites"),
        (Protocol(ranks=2, calls=2, slots=1, blanks=False), "takes a word|nobody"),
        (Protocol(ranks=2, calls=3, blanks=False), "takes a word"),
        (Protocol(ranks=2, calls=4, period=3), "overwrites"),  # 2, 0: the same slot twice running
        (Protocol(ranks=3, calls=3, idle=frozenset({2})), "overwrites"),  # a rank without heads that waits for no one
    ],
    ids=str,
)
def test_what_the_proof_needs(protocol, why):
    with pytest.raises(WrongError, match=why):
        explore(protocol)
