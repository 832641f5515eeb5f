"""The auditor: reads a whole Redis and lists what is wrong with it, by the rules, not by the scripts.

Any test may call it, on a service at rest or in full run: each call reads the server in one transaction.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from serve_app.domain.errors import UnreadableRecord
from serve_app.domain.jobs import JobKind, JobState
from serve_app.jobs.compact_form import request_bytes
from serve_app.jobs.records import JOB_BYTES, read_job
from serve_app.store.keys import KEY_MAP, PREFIX, Key

DAY_MS = 86_400_000
LIVE = {"queued", "running"}
OF_ATTEMPTS = ("waiting_since", "rate_token", "tries", "losses", "skips", "skipped_at", "charge", "worker", "cancel")
OF_WAITING = (
    "version",
    "kind",
    "group",
    "work",
    "queue_share",
    "num_images",
    "sequence",
    "plan",
    "sample",
    "request_id",
    "traceparent",
)
"""Fields that nobody reads of an ended job, and of one that did not fail."""
ENDED = ("completed", "failed", "canceled", "expired")


def _pools(reading: "Reading") -> list[str]:
    return [*JobKind, *reading.members("pools")]


class Reading:
    """Every key of the server at one moment.

    It has each value as Python data, and its time to live in ms (-1 for ever).
    """

    def __init__(self, client: Any) -> None:
        text = """
        local out = {}
        for _, name in ipairs(redis.call('KEYS', '*')) do
          local type = redis.call('TYPE', name).ok
          local value
          if type == 'string' then value = {redis.call('GET', name)}
          elseif type == 'hash' then value = redis.call('HGETALL', name)
          elseif type == 'stream' then value = {}
          elseif type == 'list' then value = redis.call('LRANGE', name, 0, -1)
          elseif type == 'zset' then value = redis.call('ZRANGE', name, 0, -1, 'WITHSCORES')
          else value = redis.call('SMEMBERS', name) end
          out[#out + 1] = {name, type, redis.call('PTTL', name), value}
        end
        return out"""
        self.types: dict[str, str] = {}
        self.ttl: dict[str, int] = {}
        self._values: dict[str, list[str]] = {}
        for name, type_name, ttl, value in client.eval(text, 0):
            self.types[name], self.ttl[name], self._values[name] = type_name, ttl, value

    def text(self, name: str, default: str = "") -> str:
        return self._values.get(PREFIX + name, [default])[0]

    def row(self, name: str) -> dict[str, str]:
        flat = self._values.get(PREFIX + name, [])
        return dict(zip(flat[::2], flat[1::2], strict=True))

    def members(self, name: str) -> set[str]:
        return set(self._values.get(PREFIX + name, []))

    def scores(self, name: str) -> dict[str, float]:
        return {member: float(score) for member, score in self.row(name).items()}

    def names(self, family: str) -> list[str]:
        """What follows `family:` in the names of that family's keys."""
        head = f"{PREFIX}{family}:"
        return [name.removeprefix(head) for name in self._values if name.startswith(head)]


def audit(client: Any, *, max_attempts: int, max_skips: int = 4) -> list[str]:
    """List everything that is wrong, in words."""
    reading = Reading(client)
    return [
        *_keys(reading),
        *_places(reading),
        *_totals(reading),
        *_stored(reading),
        *_vtimes(reading),
        *_records(reading, max_attempts=max_attempts, max_skips=max_skips),
    ]


def key_problems(client: Any) -> list[str]:
    """Keys that the key map does not name, of a wrong type, or that nothing would ever remove."""
    return list(_keys(Reading(client)))


def _keys(reading: Reading) -> Iterator[str]:
    for name, type_name in reading.types.items():
        known = _entry(name)
        if known is None:
            yield f"{name}: not in the key map"
        elif known.type != type_name:
            yield f"{name}: is a {type_name}, the key map says {known.type}"
        elif not known.life.startswith("permanent") and reading.ttl[name] == -1:
            yield f"{name}: never expires"


def _entry(name: str) -> Key | None:
    if not name.startswith(PREFIX):
        return None
    short = name.removeprefix(PREFIX)
    found = [known for known in KEY_MAP if fnmatchcase(short, known.name)]
    return found[0] if len(found) == 1 else None


def _jobs(reading: Reading) -> Mapping[str, dict[str, str]]:
    """Every record, with its kind, which an ended one leaves to its id."""
    rows = {job_id: reading.row(f"job:{job_id}") for job_id in reading.names("job")}
    return {
        job_id: {"kind": "upscale" if job_id.startswith("up_") else "generation", **row} for job_id, row in rows.items()
    }


def _places(reading: Reading) -> Iterator[str]:
    """Each job is in exactly the places that its state names."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for family in ("queue", "quarantine", "delay", "lease"):
        for name in reading.names(family):
            for job_id in reading.row(f"{family}:{name}"):
                places[job_id].append(f"{family}:{name}")
    jobs = _jobs(reading)
    for job_id in places.keys() - jobs.keys():
        yield f"{job_id}: in {places[job_id]}, but has no record"
    for job_id, job in jobs.items():
        wanted = {
            "queued": ([_waiting_place(job)], [f"delay:{job['kind']}"]),
            "running": ([f"lease:{job['kind']}"],),
        }.get(job["state"], ([],))
        if places[job_id] not in wanted:
            yield f"{job_id}: {job['state']}, but in {places[job_id]}"
        is_aging = job_id in reading.row(f"age:{job['kind']}")
        if is_aging != (job["state"] == "queued"):
            yield f"{job_id}: {job['state']}, but {'' if is_aging else 'not '}in age"
        if "plan" in job and is_aging != (job_id in reading.row(f"plan_age:{job['kind']}:{job['plan']}")):
            yield f"{job_id}: {'not ' if is_aging else ''}in the age of {job['plan']}"
    yield from _groups(reading, jobs)
    yield from _of_loras(reading, jobs)
    yield from _held(reading, jobs)


def _waiting_place(job: Mapping[str, str]) -> str:
    if int(job.get("losses", 0)) >= 2:
        return f"quarantine:{job['kind']}"
    return f"queue:{job['kind']}:{job['account']}"


def _of_loras(reading: Reading, jobs: Mapping[str, dict[str, str]]) -> Iterator[str]:
    """The index of a LoRA, and of a base model that jobs name, holds its waiting jobs."""
    wanted: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for job_id, job in jobs.items():
        loras, base = [job.get("adapter", ""), *job.get("more_adapters", "").split("\n")], job.get("base")
        for name in filter(None, (*loras, f"base:{base}" if base else "")):
            if job["state"] == "queued":
                wanted[name][job_id] = float(job["sequence"])
    found = {name: reading.scores(f"lora_jobs:{name}") for name in reading.names("lora_jobs")}
    if found != dict(wanted):
        yield f"the index of waiting jobs by LoRA: {found}, waiting {dict(wanted)}"


def _held(reading: Reading, jobs: Mapping[str, dict[str, str]]) -> Iterator[str]:
    """What a worker holds is what runs on it; a quarantined job runs alone."""
    running: defaultdict[str, set[str]] = defaultdict(set)
    for job_id, job in jobs.items():
        if job["state"] == "running":
            running[f"{job['kind']}:{job.get('worker')}"].add(job_id)
    claimed = {name: reading.members(f"claimed:{name}") for name in reading.names("claimed")}
    if claimed != dict(running):
        yield f"workers hold {claimed}, running on them {dict(running)}"
    for worker, job_ids in running.items():
        quarantined = [job_id for job_id in job_ids if int(jobs[job_id].get("losses", 0)) >= 2]
        if quarantined and len(job_ids) > 1:
            yield f"{quarantined} lost two workers and shares {worker} with {job_ids}"


def _groups(reading: Reading, jobs: Mapping[str, dict[str, str]]) -> Iterator[str]:
    wanted: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for name in reading.names("queue"):
        for job_id, sequence in reading.scores(f"queue:{name}").items():
            job = jobs.get(job_id, {})
            if job.get("group"):
                wanted[f"{job['kind']}:{job['group']}"][job_id] = sequence
            if job and float(job["sequence"]) != sequence:
                yield f"{job_id}: not at its own place in the queue"
    found = {name: reading.scores(f"group:{name}") for name in reading.names("group")}
    if found != dict(wanted):
        yield f"group index differs from the queues: {found} {dict(wanted)}"
    for kind in _pools(reading):
        heads = {
            name.removeprefix(f"{kind}:"): min(rows.values())
            for name, rows in wanted.items()
            if name.startswith(f"{kind}:")
        }
        if reading.scores(f"groups:{kind}") != heads:
            yield f"first places of the {kind} groups are wrong"


def _totals(reading: Reading) -> Iterator[str]:
    jobs = _jobs(reading)
    live = Counter(job["account"] for job in jobs.values() if job["state"] in LIVE)
    stored = {account: int(number) for account, number in reading.row("unfinished").items()}
    if stored != dict(live):
        yield f"live jobs per account: {stored}, counted {dict(live)}"
    for kind in _pools(reading):
        row = reading.row(f"load:{kind}")
        queues = [f"queue:{name}" for name in reading.names("queue")] + [f"quarantine:{kind}"]
        ready = {job_id for name in queues for job_id in reading.row(name)}
        mine = {job_id: job for job_id, job in jobs.items() if job["kind"] == kind}
        wanted = {
            "ready": sum(job_id in ready for job_id in mine),
            "ready_work": sum(int(job["work"]) for job_id, job in mine.items() if job_id in ready),
            "work": sum(int(job["work"]) for job in mine.values() if job["state"] in LIVE),
        }
        for name, number in wanted.items():
            if int(row.get(name, 0)) != number:
                yield f"load of {kind}: {name} is {row.get(name)}, counted {number}"
    count = {name: int(number) for name, number in reading.row("count").items()}
    ended = sum(count.get(state, 0) for state in ENDED)
    if count.get("accepted", 0) != ended + sum(live.values()):
        yield f"accepted {count.get('accepted')} jobs, but {ended} ended and {sum(live.values())} live"


def _stored(reading: Reading) -> Iterator[str]:
    """Each stored job's bytes are counted once; those of a damaged request are not known."""
    wanted: defaultdict[str, Counter[str]] = defaultdict(Counter)
    damaged: set[str] = set()
    for job_id, row in _jobs(reading).items():
        name = f"{row['account']}:{row['variant']}"
        try:
            is_whole = read_job(job_id, row).request is not None
        except UnreadableRecord:
            is_whole = False
        if is_whole:
            wanted[name][str(int(row["created"]) // DAY_MS)] += JOB_BYTES + request_bytes(row)
        else:
            damaged.add(name)
    found = {
        name: {day: int(number) for day, number in reading.row(f"stored:{name}").items()}
        for name in reading.names("stored")
    }
    for name in (found.keys() | wanted.keys()) - damaged:
        if found.get(name, {}) != wanted[name]:
            yield f"stored bytes of {name}: {found.get(name)}, its jobs have {dict(wanted[name])}"


def _vtimes(reading: Reading) -> Iterator[str]:
    """Check that an account has a virtual time exactly while it has something ready.

    An idle one is remembered only while it is ahead.
    """
    for kind in _pools(reading):
        waiting = {name.removeprefix(f"{kind}:") for name in reading.names("queue") if name.startswith(f"{kind}:")}
        vtimes, idle = reading.scores(f"vtime:{kind}"), reading.scores(f"idle_vtime:{kind}")
        if vtimes.keys() != waiting:
            yield f"virtual times of {kind}: {set(vtimes)}, waiting {waiting}"
        if idle.keys() & waiting:
            yield f"idle accounts of {kind} with waiting jobs: {idle.keys() & waiting}"
        global_vtime = float(reading.text(f"global_vtime:{kind}", "0"))
        if any(vtime <= global_vtime for vtime in idle.values()) and vtimes:
            yield f"idle accounts of {kind} remembered behind the global virtual time"
        if any(vtime < global_vtime for vtime in vtimes.values()):
            yield f"a virtual time of {kind} is behind the global one"


def _records(reading: Reading, *, max_attempts: int, max_skips: int) -> Iterator[str]:
    dead = reading.row("dead")
    for job_id, row in _jobs(reading).items():
        try:
            job = read_job(job_id, row)
        except UnreadableRecord:
            yield f"{job_id}: its record cannot be read"
            continue
        if int(row.get("tries", 0)) > max_attempts:
            yield f"{job_id}: tried {row['tries']} times"
        if int(row.get("skips", 0)) > max_skips:
            yield f"{job_id}: passed over {row['skips']} times"
        if (job.progress == 100) != (job.state is JobState.COMPLETED) or not 0 <= job.progress <= 100:
            yield f"{job_id}: {job.state} at {job.progress} %"
        if (reading.ttl[f"{PREFIX}job:{job_id}"] == -1) != (row["state"] in LIVE):
            yield f"{job_id}: {job.state}, with ttl {reading.ttl[f'{PREFIX}job:{job_id}']}"
        if (job_id in dead) != (job.state is JobState.FAILED):
            yield f"{job_id}: {job.state}, {'' if job_id in dead else 'not '}a dead letter"
        if (job.failure is None) != (job.state in (JobState.QUEUED, JobState.RUNNING, JobState.COMPLETED)):
            yield f"{job_id}: {job.state} with failure {job.failure}"
        if "r0" in row and job.state is not JobState.COMPLETED:
            yield f"{job_id}: {job.state} with a result"
        over = (
            {*OF_ATTEMPTS, *(OF_WAITING if job.state is not JobState.FAILED else ())}
            if job.state.is_terminal
            else set()
        )
        if left := over & reading.row(f"job:{job_id}").keys():
            yield f"{job_id}: {job.state} with {sorted(left)}"
        for image in job.images:
            if reading.text(f"image:{image.image_id}") != job_id:
                yield f"{job_id}: its image {image.image_id} leads elsewhere"
