"""Waiting requests in the order of their turn, of which many can be left out at once.

Requests that wait for the same block need not be looked at one by one. The queue is a tree of their
block hashes, in which those that begin alike lie under one branch, and every branch knows which of
its requests comes first::

    hashes                              tree                    first of the branch
    r1   a b c d                        a b ── c d ── e   r4    r1
    r2   a b x                           │      └── (r1)        r1
    r3   k                               └──── x  (r2)          r2
    r4   a b c d e                      k  (r3)                 r3

Leaving out all that begin with ``a b c`` is to close one branch. Whatever is added, taken out or
left out changes the firsts on the way up from there only, so no step costs more for a longer queue.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import TypeAlias

from engine.requests.request import Request
from prefix_cache import BlockHash

__all__ = ["WaitingQueue"]

Key: TypeAlias = tuple[int, int]
_Entry: TypeAlias = "tuple[Key, int, Request | _Branch]"

_Choice: TypeAlias = Callable[[Set[BlockHash]], Set[BlockHash]]

_FEW = 16


@dataclass(slots=True, eq=False)
class _Branch:
    """Requests whose hashes begin alike.

    Attributes:
        parent: the branch that it leaves; None for the root, and for one that is gone.
        hashes: of any of its requests; the first ``depth`` are those of all.
        depth: how many are alike.
        children: what goes on from here, by the next hash.
        num_own: requests that have no hashes beyond ``depth``.
        heap: the own requests and the children, each with its key; stale entries are left until
            they come first, or are many.
        num_stale: of the entries at most.
        posted: key of the first request here, as the parent's heap has it; None: none is open.
        ticket: number of that entry; entries of other numbers are stale.
        but: None while it is open. Else all is left out but these children.
    """

    parent: _Branch | None
    hashes: Sequence[BlockHash]
    depth: int
    children: dict[BlockHash, _Branch] = field(default_factory=dict)
    num_own: int = 0
    heap: list[_Entry] = field(default_factory=list)
    num_stale: int = 0
    posted: Key | None = None
    ticket: int = -1
    but: tuple[_Branch, ...] | None = None


class WaitingQueue:
    """Requests by ``Request.queue_key``."""

    def __init__(self) -> None:
        self._root = _Branch(None, (), 0)
        self._places: dict[str, tuple[_Branch, int, Request]] = {}
        self._closed: list[_Branch] = []
        self._passed: list[Request] = []
        self._num_tickets = 0

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Request]:
        """All requests, in no particular order."""
        return (request for _, _, request in self._places.values())

    def add(self, request: Request, hashes: Sequence[BlockHash]) -> None:
        """Put a request in.

        Args:
            request: one that is not here.
            hashes: of the blocks that it could find; each stands for those before it as well.
        """
        branch = self._root
        while branch.depth < len(hashes):
            child = branch.children.get(hashes[branch.depth])
            if child is None:
                child = _Branch(branch, hashes, len(hashes))
                branch.children[hashes[branch.depth]] = child
            else:
                end = min(child.depth, len(hashes))
                alike = _num_alike(child.hashes, hashes, branch.depth + 1, end)
                if alike < child.depth:
                    child = self._split(child, alike)
            branch = child
        branch.num_own += 1
        self._enter(branch, request)

    def remove(self, request: Request) -> None:
        """Take a request out. ``KeyError`` if it is not here."""
        branch, _, _ = self._places.pop(request.request_id)
        branch.num_own -= 1
        self._outdate(branch)
        self._tidy(branch)

    def first(self) -> Request | None:
        """The first request that is not left out."""
        branch = self._root
        while True:
            item = self._first_of(branch)
            if not isinstance(item, _Branch):
                return item
            branch = item

    def pass_over(self, request: Request) -> None:
        """Leave a request out until :meth:`reopen`."""
        branch, _, _ = self._places[request.request_id]
        self._places[request.request_id] = (branch, -1, request)
        self._outdate(branch)
        self._passed.append(request)
        self._post(branch)

    def pass_over_alike(
        self, request: Request, num_hashes: int, but: _Choice | None = None
    ) -> None:
        """Leave out, until :meth:`reopen`, all whose first hashes are those of a request.

        Args:
            request: it is left out in any case.
            num_hashes: how many hashes count, at least 1.
            but: of the hashes with which others go on, those of which none is to be left out.
        """
        branch, _, _ = self._places[request.request_id]
        if branch.depth < num_hashes:  # it has got more of them since it came
            self.pass_over(request)
            return
        own_child = branch
        while branch.parent is not None and branch.parent.depth >= num_hashes:
            own_child, branch = branch, branch.parent
        if branch.depth > num_hashes:
            own_child, branch = branch, self._split(branch, num_hashes)
        branch.but = ()
        if but is not None:
            kept = (branch.children[each] for each in but(branch.children.keys()))
            branch.but = tuple(child for child in kept if child is not own_child)
        self._closed.append(branch)
        self._post(branch)

    def reopen(self) -> None:
        """Let all requests be found again."""
        closed, self._closed = self._closed, []
        for branch in closed:
            branch.but = None
            if branch.parent is not None:
                self._post(branch)
                self._tidy(branch)
        passed, self._passed = self._passed, []
        for request in passed:
            if request.request_id in self._places:
                self._enter(self._places[request.request_id][0], request)

    def _enter(self, branch: _Branch, request: Request) -> None:
        self._num_tickets += 1
        self._places[request.request_id] = (branch, self._num_tickets, request)
        heappush(branch.heap, (request.queue_key, self._num_tickets, request))
        self._post(branch)

    def _post(self, branch: _Branch) -> None:
        """Tell the branches above which request is now the first here."""
        while branch.parent is not None:
            parent, key = branch.parent, self._first_key(branch)
            if key == branch.posted:
                return
            was_posted, branch.posted = branch.posted is not None, key
            self._num_tickets += 1
            branch.ticket = self._num_tickets
            if was_posted:
                self._outdate(parent)
            if key is not None:
                heappush(parent.heap, (key, branch.ticket, branch))
            branch = parent

    def _first_key(self, branch: _Branch) -> Key | None:
        item = self._first_of(branch)
        if item is None:
            return None
        return item.posted if isinstance(item, _Branch) else item.queue_key

    def _first_of(self, branch: _Branch) -> Request | _Branch | None:
        """What comes first among a branch's children and own requests, as far as they are open."""
        if branch.but is not None:
            opened = [(child.posted, child) for child in branch.but if child.posted is not None]
            return min(opened, key=lambda pair: pair[0])[1] if opened else None
        heap = branch.heap
        while heap and not self._is_current(heap[0]):
            heappop(heap)
            branch.num_stale -= 1
        return heap[0][2] if heap else None

    def _outdate(self, branch: _Branch) -> None:
        """One more entry of a branch's heap is stale; when most are, they are thrown away."""
        branch.num_stale += 1
        if branch.num_stale > _FEW + len(branch.heap) // 2:
            branch.heap = [entry for entry in branch.heap if self._is_current(entry)]
            heapify(branch.heap)
            branch.num_stale = 0

    def _is_current(self, entry: _Entry) -> bool:
        _, ticket, item = entry
        if isinstance(item, _Branch):
            return item.ticket == ticket and item.posted is not None
        place = self._places.get(item.request_id)
        return place is not None and place[1] == ticket

    def _split(self, branch: _Branch, depth: int) -> _Branch:
        """Put a new branch of this depth between a branch and its parent."""
        parent = branch.parent
        if parent is None:
            raise ValueError("the root has no parent")
        new = _Branch(parent, branch.hashes, depth)
        self._replace(parent, branch, new)
        self._hang(branch, new)
        return new

    def _tidy(self, branch: _Branch) -> None:
        """Take away branches that are empty, or do nothing but go on in one way."""
        while (
            branch.parent is not None
            and branch.but is None
            and not branch.num_own
            and len(branch.children) < 2
        ):
            parent, only = branch.parent, next(iter(branch.children.values()), None)
            self._replace(parent, branch, only)
            branch.parent = None
            if only is not None:
                self._hang(only, parent)
            branch = parent
        self._post(branch)

    def _replace(self, parent: _Branch, old: _Branch, new: _Branch | None) -> None:
        """Let a parent have another branch, or none, where it had an old one."""
        key = old.hashes[parent.depth]
        if new is None:
            del parent.children[key]
        else:
            parent.children[key] = new
        if parent.but is not None:
            kept = (new if child is old else child for child in parent.but)
            parent.but = tuple(child for child in kept if child is not None)
        if old.posted is not None:
            old.posted = None
            self._outdate(parent)

    def _hang(self, branch: _Branch, parent: _Branch) -> None:
        """Let a branch go on from another one, of whose heap it is not yet part."""
        branch.parent = parent
        parent.children[branch.hashes[parent.depth]] = branch
        branch.posted = None
        self._post(branch)


def _num_alike(a: Sequence[BlockHash], b: Sequence[BlockHash], start: int, end: int) -> int:
    """How many hashes are equal: ``start`` at least; each stands for those before it as well."""
    return start + bisect_left(range(start, end), True, key=lambda index: a[index] != b[index])
