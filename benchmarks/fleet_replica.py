"""Simulates a generator: runs that share its forward passes, and adapters in LRU slots."""

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from serve_app.domain.jobs import Claim


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """The speed of a replica.

    A forward pass of all its runs takes longer than one of a single run, and draws more images.
    """

    runs: int = 8
    slots: int = 128
    image_ms: float = 2_000.0
    """Replica's time for each image while all its runs are busy."""
    alone_ms: float = 3_000.0
    """The same while it draws one image only: SDXL wins 1.6 to 2 times by batching, SD 1.5 more."""
    load_ms: float = 1_500.0
    """An adapter that was not there takes this long from the claim to its slot."""
    prefetch_ms: int = 2_000
    """A replica reads another adapter before a job needs it this often; 0 reads none."""

    def pass_ms(self, runs: int) -> float:
        """Return how long an image takes among `runs`, from its first step to its last."""
        slope = (self.runs * self.image_ms - self.alone_ms) / max(1, self.runs - 1)
        return self.alone_ms + (runs - 1) * slope


@dataclass
class ClaimedJob:
    claim: Claim
    loaded_at: float
    began: float | None = None
    seconds: float = 0.0
    """Its share of the replica's time in each pass."""
    images_left: int = field(init=False)

    def __post_init__(self) -> None:
        self.images_left = self.claim.request.num_images


@dataclass
class Run:
    job: ClaimedJob
    left: float = 1.0


@dataclass(eq=False)
class SimulatedReplica:
    """A simulated replica.

    `held` are its adapters, the least recently used first. `active` runs step together; `pending` ones wait for their
    turn or their adapter.
    """

    name: str
    engine: Engine
    started: int
    ready_at: int
    is_draining: bool = False
    is_gone: bool = False
    is_polling: bool = False
    """It will ask for work by itself."""
    held: OrderedDict[str, None] = field(default_factory=lambda: OrderedDict[str, None]())
    active: list[Run] = field(default_factory=lambda: list[Run]())
    pending: deque[Run] = field(default_factory=lambda: deque[Run]())
    now: float = 0.0
    changes: int = 0
    """Numbers its next change: an event of an older number is void."""

    @property
    def free_runs(self) -> int:
        return max(0, self.engine.runs - len(self.active) - len(self.pending))

    @property
    def is_idle(self) -> bool:
        return not self.active and not self.pending

    @property
    def jobs(self) -> list[ClaimedJob]:
        """Return the jobs that it works on, in their order."""
        return list({id(run.job): run.job for run in (*self.active, *self.pending)}.values())

    def take(self, claim: Claim) -> bool:
        """Begin a job; return whether its adapter was here."""
        is_resident = claim.weights in self.held
        self.held[claim.weights] = None
        self.held.move_to_end(claim.weights)
        job = ClaimedJob(claim, self.now if is_resident else self.now + self.engine.load_ms)
        self.pending.extend(Run(job) for _ in range(job.images_left))
        self._evict()
        return is_resident

    def prefetch(self, groups: Iterable[str]) -> str | None:
        """Hold the first of these adapters that is not here, as the least recently used, if that evicts none."""
        absent = next((group for group in groups if group not in self.held), None)
        if absent is None or self.is_full:
            return None
        self.held[absent] = None
        self.held.move_to_end(absent, last=False)
        return absent

    @property
    def is_full(self) -> bool:
        """Return whether it holds as many adapters as it has slots."""
        return len(self.held) >= self.engine.slots

    def advance(self, at: float) -> list[ClaimedJob]:
        """Step until `at`; return the jobs that ended, in their order."""
        if self.active:
            passed = (at - self.now) / self.engine.pass_ms(len(self.active))
            share = (at - self.now) / len(self.active) / 1000
            for run in self.active:
                run.left -= passed
                run.job.seconds += share
        self.now = at
        ended: list[ClaimedJob] = []
        for run in self.active:
            if run.left <= 1e-9:
                run.job.images_left -= 1
                if run.job.images_left == 0:
                    ended.append(run.job)
        self.active = [run for run in self.active if run.left > 1e-9]
        return ended

    def admit(self) -> None:
        """Let loaded runs join the next pass."""
        waiting = deque[Run]()
        for run in self.pending:
            if len(self.active) < self.engine.runs and run.job.loaded_at <= self.now:
                if run.job.began is None:
                    run.job.began = self.now
                self.active.append(run)
            else:
                waiting.append(run)
        self.pending = waiting

    def next_change(self) -> float | None:
        """When a run ends or an adapter has been loaded."""
        ends = (
            [self.now + min(run.left for run in self.active) * self.engine.pass_ms(len(self.active))]
            if self.active
            else []
        )
        loads = [run.job.loaded_at for run in self.pending if run.job.loaded_at > self.now]
        return min(ends + loads, default=None)

    def _evict(self) -> None:
        if len(self.held) <= self.engine.slots:
            return
        used = {run.job.claim.weights for run in (*self.active, *self.pending)}
        oldest = next((group for group in self.held if group not in used), None)
        if oldest is not None:
            del self.held[oldest]
