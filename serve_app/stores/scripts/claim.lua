-- include queue
-- claim: hand waiting jobs to a worker, fairly between accounts, preferring adapters that the worker holds.
-- ARGV: kind, worker, nonce, room (images), lease ms, K skips, T ms, lead L in average waiting jobs, owner wait ms, worker life ms,
--       pace before any measurement, then the resident groups
-- Returns {id, attempt, group, account, request, created} repeated. A repeated nonce gets the same jobs again.
local kind, worker, nonce, room = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local lease, max_skips, max_wait, lead = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])
local owner_wait, worker_life, default_pace = tonumber(ARGV[9]), tonumber(ARGV[10]), tonumber(ARGV[11])
local FIRST_RESIDENT = 12
local OWNER_LIFE = 600000 -- ms that a worker is remembered as the owner of a group it loaded
local OWNERS = 8          -- remembered per group
local HELD_LIFE = 86400000 -- ms; far beyond any attempt
local NEAR = 4            -- how many groups, accounts and jobs of each are looked at beyond the head: a claim stays flat
local SEEN_EVERY = 1000   -- ms between two writes of a sign of life: idle polls stay reads
local MANY = 128          -- groups looked up at once

local last = K('claim:' .. kind .. ':' .. worker)
local load, workers, rooms = K('load:' .. kind), K('workers:' .. kind), K('room:' .. kind)
local pace = num(redis.call('HGET', load, 'pace'), default_pace)

local function handed_out(id, attempt)
  local job = redis.call('HMGET', K('job:' .. id), 'group', 'account', 'request', 'created')
  return id, attempt, job[1], job[2], job[3], job[4]
end

local function append(out, ...)
  for _, value in ipairs({...}) do out[#out + 1] = value end
end

local function same_again()
  local out = {}
  for _, given in ipairs(cjson.decode(redis.call('HGET', last, 'given'))) do
    local job = read_job(given[1])
    if is_held(job, given[2]) and job.worker == worker then append(out, handed_out(given[1], given[2])) end
  end
  return out
end

if redis.call('HGET', last, 'nonce') == nonce then return same_again() end

-- Which resident groups have waiting jobs, by the sequence of their first: read when first needed, then kept up to date.
-- A worker that holds many adapters looks among the groups that have waited longest, and if it holds none of those,
-- among another part of its own at each claim: a claim's cost does not grow with what a worker holds.
local resident, first_of = {}, nil
for i = FIRST_RESIDENT, #ARGV do resident[ARGV[i]] = true end

local function longest_waiting()
  local found = {}
  local oldest = redis.call('ZRANGE', K('groups:' .. kind), 0, MANY - 1, 'WITHSCORES')
  for i = 1, #oldest, 2 do
    if resident[oldest[i]] then found[oldest[i]] = tonumber(oldest[i + 1]) end
  end
  return found
end

local function waiting_of_my_own(first)
  local found = {}
  local last_one = math.min(first + MANY - 1, #ARGV)
  if first > last_one then return found end
  local scores = redis.call('ZMSCORE', K('groups:' .. kind), unpack(ARGV, first, last_one))
  for n, score in ipairs(scores) do
    if score then found[ARGV[first + n - 1]] = tonumber(score) end
  end
  return found
end

local function waiting_resident_groups()
  if first_of then return first_of end
  local parts = math.ceil((#ARGV - FIRST_RESIDENT + 1) / MANY)
  if parts > 1 then first_of = longest_waiting() end
  if not first_of or next(first_of) == nil then
    first_of = waiting_of_my_own(FIRST_RESIDENT + MANY * (now % math.max(1, parts)))
  end
  return first_of
end

local function nearest_groups()
  local best = {}
  for group, sequence in pairs(waiting_resident_groups()) do
    local place = #best + 1
    while place > 1 and best[place - 1].sequence > sequence do place = place - 1 end
    if place <= NEAR then
      table.insert(best, place, {group = group, sequence = sequence})
      best[NEAR + 1] = nil
    end
  end
  return best
end

-- What an average waiting job costs, in seconds: the measure of how far ahead is too far, on any hardware.
local average_cost
local function lead_allowed()
  if not average_cost then
    local waiting = redis.call('HMGET', load, 'ready', 'ready_work')
    average_cost = num(waiting[2], 0) / math.max(1, num(waiting[1], 1)) / 1000 * pace
  end
  return lead * average_cost
end

local function leads_too_far(account, clock)
  return num(redis.call('ZSCORE', K('turn:' .. kind), account), clock) - clock > lead_allowed()
end

-- The oldest job of a held adapter whose account is not further ahead than the lead allows.
local function of_a_resident_group(clock)
  for _, near in ipairs(nearest_groups()) do
    for _, id in ipairs(redis.call('ZRANGE', K('group:' .. kind .. ':' .. near.group), 0, NEAR - 1)) do
      local job = read_job(id)
      if job and not leads_too_far(job.account, clock) then return job end
    end
  end
end

-- Another live worker with room holds the adapter and will come for the job, unless the job has waited long enough.
local function is_left_to_its_owner(job)
  if job.group == '' or resident[job.group] or now - job.since >= owner_wait then return false end
  for _, owner in ipairs(redis.call('ZRANGE', K('owner:' .. kind .. ':' .. job.group), 0, -1)) do
    local seen = owner ~= worker and redis.call('ZSCORE', workers, owner)
    if seen and now - seen < worker_life and num(redis.call('HGET', rooms, owner), 0) > 0 then return true end
  end
  return false
end

local function of_no_owner(clock)
  for _, account in ipairs(redis.call('ZRANGE', K('turn:' .. kind), 0, NEAR - 1)) do
    if not leads_too_far(account, clock) then
      for _, id in ipairs(redis.call('ZRANGE', K('queue:' .. kind .. ':' .. account), 0, NEAR - 1)) do
        local job = read_job(id)
        if job and not is_left_to_its_owner(job) then return job end
      end
    end
  end
end

local function fair_head()
  while true do
    local turn = redis.call('ZRANGE', K('turn:' .. kind), 0, 0, 'WITHSCORES')
    if not turn[1] then return nil end
    local id = redis.call('ZRANGE', K('queue:' .. kind .. ':' .. turn[1]), 0, 0)[1]
    local job = id and read_job(id)
    if job then return job, tonumber(turn[2]) end
    -- a record that somebody deleted by hand: forget its place
    if id then redis.call('ZREM', K('queue:' .. kind .. ':' .. turn[1]), id) else redis.call('ZREM', K('turn:' .. kind), turn[1]) end
  end
end

local function pass_over(head)
  redis.call('HINCRBY', K('job:' .. head.id), 'skips', 1)
  redis.call('HSETNX', K('job:' .. head.id), 'skipped_at', now)
end

local function pick()
  local head, virtual = fair_head()
  if not head then return nil end
  local clock = clock_of(kind)
  if virtual > clock then
    clock = virtual
    set_clock(kind, clock)
    redis.call('ZREMRANGEBYSCORE', K('idle:' .. kind), '-inf', clock)
  end
  if head.group == '' or resident[head.group] then return head end
  if head.skips >= max_skips or (head.skipped_at and now - head.skipped_at >= max_wait) then return head end
  local other = of_a_resident_group(clock)
  if not other then
    if not is_left_to_its_owner(head) then return head end
    other = of_no_owner(clock)
  end
  if other and other.id ~= head.id then pass_over(head) end
  return other
end

-- Jobs that were there when workers died run one at a time on one worker that holds nothing else, so that the one at fault
-- ends alone. That worker takes nothing more until it is empty. Returns the job to run now, and whether to keep apart.
local function next_suspect()
  local duty = K('alone:' .. kind)
  local waits = redis.call('EXISTS', K('suspect:' .. kind)) == 1
  local on_duty = redis.call('GET', duty)
  if waits and not on_duty then
    redis.call('SET', duty, worker, 'PX', lease)
    on_duty = worker
  end
  if on_duty ~= worker then return nil, false end
  local is_empty = redis.call('EXISTS', held_by(kind, worker)) == 0
  if is_empty and not waits then
    redis.call('DEL', duty)
    return nil, false
  end
  redis.call('PEXPIRE', duty, lease)
  if not is_empty then return nil, true end
  local id = redis.call('ZRANGE', K('suspect:' .. kind), 0, 0)[1]
  local job = read_job(id)
  if not job then redis.call('ZREM', K('suspect:' .. kind), id) end
  return job, true
end

local function lease_to_worker(job)
  local cost = job.work / 1000 * pace
  charge(kind, job.account, cost / job.weight) -- before it leaves the queue, so that an account's last job counts too
  take_from_queue(job)
  local attempt = redis.call('HINCRBY', K('job:' .. job.id), 'attempt', 1)
  redis.call('HINCRBY', K('job:' .. job.id), 'tries', 1)
  redis.call('HSET', K('job:' .. job.id), 'state', 'running', 'worker', worker, 'started', now,
    'charge', string.format('%.17g', cost))
  redis.call('ZADD', K('lease:' .. kind), now + lease, job.id)
  redis.call('SADD', held_by(kind, worker), job.id)
  redis.call('PEXPIRE', held_by(kind, worker), HELD_LIFE)
  if job.group == '' then return attempt end
  local owners = K('owner:' .. kind .. ':' .. job.group)
  redis.call('ZADD', owners, now, worker)
  redis.call('ZREMRANGEBYRANK', owners, 0, -OWNERS - 1)
  redis.call('PEXPIRE', owners, OWNER_LIFE)
  resident[job.group] = true -- from now on this worker holds it
  if first_of then first_of[job.group] = tonumber(redis.call('ZSCORE', K('groups:' .. kind), job.group)) end
  return attempt
end

redis.call('ZREM', K('delay:' .. kind), '') -- a first write that frees memory: the rest is then allowed on a full server
promote_due(kind, 32)
local out, given = {}, {}
local suspect, is_apart = next_suspect()
while room > 0 and not (is_apart and #given > 0) do
  local job
  if is_apart then job = suspect else job = pick() end
  if not job then break end
  local attempt = lease_to_worker(job)
  given[#given + 1] = {job.id, attempt}
  append(out, handed_out(job.id, attempt))
  room = room - job.images
end

if is_apart then room = 0 end -- it has none for others
local seen = num(redis.call('ZSCORE', workers, worker), 0)
if now - seen >= SEEN_EVERY or num(redis.call('HGET', rooms, worker), -1) ~= room then
  redis.call('ZADD', workers, now, worker)
  redis.call('HSET', rooms, worker, room)
end
if #given > 0 then
  redis.call('HSET', last, 'nonce', nonce, 'given', cjson.encode(given))
  redis.call('PEXPIRE', last, 2 * lease)
end
return out
