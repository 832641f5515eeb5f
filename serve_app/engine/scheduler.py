"""Chooses the runs of the next step: deficit round robin over batch keys, runs of a key in turn."""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

from serve_app.engine.run import BatchKey, Run


class Scheduler:
    """The running set, which only the step thread may use: it is not thread-safe.

    With `max_runs` 0, runs join while two rows are free.
    """

    def __init__(self, *, max_runs: int, max_rows: int) -> None:
        self.max_runs = max_runs
        self.max_rows = max_rows
        self._queues: OrderedDict[BatchKey, deque[Run]] = OrderedDict()
        self._deficits: dict[BatchKey, int] = {}
        self._row_limits: dict[BatchKey, int] = {}

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    @property
    def free_runs(self) -> int:
        return self.free_beside([run.rows for queue in self._queues.values() for run in queue])

    def free_beside(self, rows: Sequence[int]) -> int:
        """Return how many runs may join those that take so many rows each; any thread may call it."""
        return max(0, self.max_runs - len(rows) if self.max_runs else (self.max_rows - sum(rows)) // 2)

    def add(self, run: Run) -> None:
        self._queues.setdefault(run.batch_key, deque()).append(run)

    def remove(self, run: Run) -> None:
        queue = self._queues[run.batch_key]
        queue.remove(run)
        if not queue:
            del self._queues[run.batch_key]
            self._deficits.pop(run.batch_key, None)

    def next_batch(self) -> list[Run]:
        """Choose runs of one key that fit one forward pass; empty when nothing runs.

        Each key in turn earns the compute of the cheapest batch on offer and steps once it has earned its own
        (Shreedhar & Varghese 1995), so that over time every latent shape gets the same compute.
        """
        offers = {
            key: self._offer(queue, self._row_limits.get(key, self.max_rows)) for key, queue in self._queues.items()
        }
        if not offers:
            return []
        quantum = min(_cost(batch) for batch in offers.values())
        while True:
            key = next(iter(self._queues))
            self._queues.move_to_end(key)
            self._deficits[key] = self._deficits.get(key, 0) + quantum
            if self._deficits[key] >= _cost(offers[key]):
                self._deficits[key] -= _cost(offers[key])
                self._queues[key].rotate(-len(offers[key]))
                return offers[key]

    def limit_rows(self, key: BatchKey, rows: int) -> None:
        """Limit a key's batches to `rows` rows, but not below one run: more did not fit in memory."""
        self._row_limits[key] = max(2, rows)

    def pop_finished(self, batch: Iterable[Run]) -> list[Run]:
        """Remove and return the runs of `batch` that have made their last step."""
        done = [run for run in batch if run.is_done]
        for run in done:
            self.remove(run)
        return done

    def _offer(self, queue: deque[Run], max_rows: int) -> list[Run]:
        batch: list[Run] = []
        rows = 0
        for run in queue:
            if rows + run.rows > max_rows:
                break
            batch.append(run)
            rows += run.rows
        return batch


def _cost(batch: list[Run]) -> int:
    """Latent cells to denoise: the unit of compute that keys share equally."""
    return sum(run.rows * run.batch_key.cells for run in batch)
