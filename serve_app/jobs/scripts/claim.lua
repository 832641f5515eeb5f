-- include queue
-- include owners
-- args: pool, worker, nonce, capacity:number, lease_ms:number, max_skips:number, max_wait_ms:number, max_lead:number
-- args: owner_wait_ms:number, worker_life_ms:number, default_seconds_per_unit:number, retention_ms:number
-- args: resident_weights
-- claim: hand waiting jobs to a worker, fairly between accounts, preferring adapters that the worker holds.
-- `resident_weights` are digests, one a line: an idle poll need not split them, as it looks none up. `capacity` is in
-- images, `max_lead` in average waiting jobs.
-- Returns {id, attempt, record} of each. A repeated nonce gets the same jobs again.
local CLAIMED_LIFE = 86400000 -- ms; far beyond any attempt
local NEAR = 4             -- weights, accounts and jobs of each that are read beyond the head: a claim's cost stays flat
local SEEN_EVERY = 1000    -- ms between two writes of when a worker was seen: idle polls stay reads
local WEIGHTS_AT_ONCE = 128
local MAX_ENDED = 4        -- jobs that one claim ends because their account may no longer use their adapter

local last_claim = K('claim:' .. pool .. ':' .. worker)
local load, workers, capacities = K('load:' .. pool), K('workers:' .. pool), K('capacity:' .. pool)
local function claimed_job(id, attempt) return {id, attempt, redis.call('HGETALL', K('job:' .. id))} end

local function repeat_last_claim()
  local out = {}
  for _, claimed in ipairs(cjson.decode(redis.call('HGET', last_claim, 'jobs'))) do
    local job = read_job(claimed[1])
    if holds_lease(job, claimed[2]) and job.worker == worker then
      out[#out + 1] = claimed_job(claimed[1], claimed[2])
    end
  end
  return out
end

if redis.call('HGET', last_claim, 'nonce') == nonce then return repeat_last_claim() end

-- Which resident weights have waiting jobs, by the sequence of their first: read when first needed, then kept up to
-- date. A worker that holds many adapters reads the weights that have waited longest, and if it holds none of those,
-- another part of its own at each claim: a claim's cost does not grow with what a worker holds.
local held, is_held, first_sequences = nil, {}, nil

local function held_weights()
  if not held then
    held = {}
    for weights in string.gmatch(resident_weights, '[^\n]+') do
      held[#held + 1] = weights
      is_held[weights] = true
    end
  end
  return held
end

local function is_resident(weights)
  held_weights()
  return is_held[weights]
end

local function longest_waiting_weights()
  local found = {}
  local oldest = redis.call('ZRANGE', K('groups:' .. pool), 0, WEIGHTS_AT_ONCE - 1, 'WITHSCORES')
  for i = 1, #oldest, 2 do
    if is_resident(oldest[i]) then found[oldest[i]] = tonumber(oldest[i + 1]) end
  end
  return found
end

local function part_of_resident_weights(first)
  local found, all_held = {}, held_weights()
  local last = math.min(first + WEIGHTS_AT_ONCE - 1, #all_held)
  if first > last then return found end
  local scores = redis.call('ZMSCORE', K('groups:' .. pool), unpack(all_held, first, last))
  for n, score in ipairs(scores) do
    if score then found[all_held[first + n - 1]] = tonumber(score) end
  end
  return found
end

local function waiting_resident_weights()
  if first_sequences then return first_sequences end
  local parts = math.ceil(#held_weights() / WEIGHTS_AT_ONCE)
  if parts > 1 then first_sequences = longest_waiting_weights() end
  if not first_sequences or next(first_sequences) == nil then
    first_sequences = part_of_resident_weights(1 + WEIGHTS_AT_ONCE * (now % math.max(1, parts)))
  end
  return first_sequences
end

local function nearest_weights()
  local best = {}
  for weights, sequence in pairs(waiting_resident_weights()) do
    local place = #best + 1
    while place > 1 and best[place - 1].sequence > sequence do place = place - 1 end
    if place <= NEAR then
      table.insert(best, place, {weights = weights, sequence = sequence})
      best[NEAR + 1] = nil
    end
  end
  return best
end

-- How many jobs waited when the claim began, and the seconds that a unit of work takes and an average waiting job: the
-- measure of how far ahead is too far, on any hardware.
local waiting
local function read_load()
  if waiting then return waiting end
  local found = redis.call('HMGET', load, 'seconds_per_unit', 'ready', 'ready_work')
  waiting = {seconds_per_unit = num(found[1], default_seconds_per_unit), jobs = num(found[2], 1)}
  waiting.average = num(found[3], 0) / math.max(1, waiting.jobs) / 1000 * waiting.seconds_per_unit
  return waiting
end

local function leads_too_far(account, global)
  return num(redis.call('ZSCORE', K('vtime:' .. pool), account), global) - global > max_lead * read_load().average
end

-- The oldest job of a held adapter whose account is not further ahead than the lead allows.
local function job_of_resident_weights(global)
  for _, near in ipairs(nearest_weights()) do
    for _, id in ipairs(redis.call('ZRANGE', K('group:' .. pool .. ':' .. near.weights), 0, NEAR - 1)) do
      local job = read_job(id)
      if job and not leads_too_far(job.account, global) then return job end
    end
  end
end

-- Whether another live worker with capacity holds the adapter: looked up once in a claim, during which no other worker
-- changes.
local free_owners = {}
local function has_free_owner(weights)
  if free_owners[weights] ~= nil then return free_owners[weights] end
  free_owners[weights] = false
  local owners = redis.call('ZRANGE', K('owner:' .. pool .. ':' .. weights), 0, -1)
  if not owners[1] or (owners[1] == worker and not owners[2]) then return false end
  local seen = redis.call('ZMSCORE', workers, unpack(owners))
  local capacity_of = redis.call('HMGET', capacities, unpack(owners))
  for n, owner in ipairs(owners) do
    local is_alive = seen[n] and now - seen[n] < worker_life_ms
    if owner ~= worker and is_alive and num(capacity_of[n], 0) > 0 then free_owners[weights] = true end
  end
  return free_owners[weights]
end

-- Whether the job is left to a worker that holds its adapter, which lasts until it has waited long enough.
local function is_left_to_owner(job)
  if job.weights == '' or is_resident(job.weights) or now - job.waiting_since >= owner_wait_ms then return false end
  return has_free_owner(job.weights)
end

local function job_without_owner(global)
  for _, account in ipairs(redis.call('ZRANGE', K('vtime:' .. pool), 0, NEAR - 1)) do
    if not leads_too_far(account, global) then
      for _, id in ipairs(redis.call('ZRANGE', K('queue:' .. pool .. ':' .. account), 0, NEAR - 1)) do
        local job = read_job(id)
        if job and not is_left_to_owner(job) then return job end
      end
    end
  end
end

-- The first job of the account that is least ahead, and that account's virtual time.
local function fair_head()
  while true do
    local first = redis.call('ZRANGE', K('vtime:' .. pool), 0, 0, 'WITHSCORES')
    if not first[1] then return nil end
    local queue = K('queue:' .. pool .. ':' .. first[1])
    local id = redis.call('ZRANGE', queue, 0, 0)[1]
    local job = id and read_job(id)
    if job then return job, tonumber(first[2]) end
    -- a record that was deleted by hand: remove its place
    if id then redis.call('ZREM', queue, id) else redis.call('ZREM', K('vtime:' .. pool), first[1]) end
  end
end

local function skip(head)
  redis.call('HINCRBY', K('job:' .. head.id), 'skips', 1)
  redis.call('HSETNX', K('job:' .. head.id), 'skipped_at', now)
end

local function next_job()
  local head, vtime = fair_head()
  if not head then return nil end
  local global = global_vtime(pool)
  if vtime > global then
    global = vtime
    set_global_vtime(pool, global)
    redis.call('ZREMRANGEBYSCORE', K('idle_vtime:' .. pool), '-inf', global)
  end
  if head.weights == '' or is_resident(head.weights) then return head end
  if head.skips >= max_skips or (head.skipped_at and now - head.skipped_at >= max_wait_ms) then return head end
  local is_alone = read_load().jobs == 1
  local other = not is_alone and job_of_resident_weights(global)
  if not other then
    if not is_left_to_owner(head) then return head end
    other = not is_alone and job_without_owner(global) or nil
  end
  if other and other.id ~= head.id then skip(head) end
  return other
end

-- Jobs that were running on workers that died run one at a time on one worker that runs nothing else, so that the one
-- at fault ends alone. That worker takes nothing more until it is empty. Returns the job to run now, and whether this
-- is that worker.
local function next_quarantined()
  local quarantine, quarantine_worker = K('quarantine:' .. pool), K('quarantine_worker:' .. pool)
  local are_waiting = redis.call('EXISTS', quarantine) == 1
  local chosen = redis.call('GET', quarantine_worker)
  if are_waiting and not chosen then
    redis.call('SET', quarantine_worker, worker, 'PX', lease_ms)
    chosen = worker
  end
  if chosen ~= worker then return nil, false end
  local is_empty = redis.call('EXISTS', claimed_key(pool, worker)) == 0
  if is_empty and not are_waiting then
    redis.call('DEL', quarantine_worker)
    return nil, false
  end
  redis.call('PEXPIRE', quarantine_worker, lease_ms)
  if not is_empty then return nil, true end
  local id = redis.call('ZRANGE', quarantine, 0, 0)[1]
  local job = read_job(id)
  if not job then redis.call('ZREM', quarantine, id) end
  return job, true
end

local function hold_weights_of(weights)
  add_owner(pool, weights, worker)
  if not is_resident(weights) then is_held[weights] = true end -- from now on this worker holds it
  if first_sequences then first_sequences[weights] = tonumber(redis.call('ZSCORE', K('groups:' .. pool), weights)) end
end

local function lease_to_worker(job)
  local cost, attempt = job.work / 1000 * read_load().seconds_per_unit, job.attempt + 1
  dequeue(job, cost / job.queue_share)
  if attempt == 1 then observe_job('job_wait_seconds', job.pool, now - job.waiting_since) end
  redis.call('HSET', K('job:' .. job.id), 'state', 'running', 'worker', worker, 'started', now - job.created,
    'charge', string.format('%.17g', cost), 'attempt', attempt, 'tries', job.tries + 1)
  redis.call('ZADD', K('lease:' .. pool), now + lease_ms, job.id)
  redis.call('SADD', claimed_key(pool, worker), job.id)
  redis.call('PEXPIRE', claimed_key(pool, worker), CLAIMED_LIFE)
  if job.weights ~= '' then hold_weights_of(job.weights) end
  return attempt
end

local out, claimed, ended, quarantined, is_quarantine_worker = {}, {}, 0, nil, false
write_also_when_full()
if redis.call('EXISTS', K('delay:' .. pool), K('quarantine:' .. pool), K('quarantine_worker:' .. pool)) > 0 then
  promote_due(pool, 32)
  quarantined, is_quarantine_worker = next_quarantined()
end
while capacity > 0 and not (is_quarantine_worker and #claimed > 0) do
  local job
  if is_quarantine_worker then job = quarantined else job = next_job() end
  if not job then break end
  if keeps_adapters(job) then
    local attempt = lease_to_worker(job)
    claimed[#claimed + 1] = {job.id, attempt}
    out[#out + 1] = claimed_job(job.id, attempt)
    capacity = capacity - job.num_images
  else
    dequeue(job)
    end_forbidden(job, retention_ms)
    ended = ended + 1
    if is_quarantine_worker or ended == MAX_ENDED then break end
  end
end

if is_quarantine_worker then capacity = 0 end -- this worker has no capacity for other jobs
if claimed[1] or now - num(redis.call('ZSCORE', workers, worker), 0) >= SEEN_EVERY
  or num(redis.call('HGET', capacities, worker), -1) ~= capacity then
  redis.call('ZADD', workers, now, worker)
  redis.call('HSET', capacities, worker, capacity)
  know_pool(pool)
end
if #claimed > 0 then
  redis.call('HSET', last_claim, 'nonce', nonce, 'jobs', cjson.encode(claimed))
  redis.call('PEXPIRE', last_claim, 2 * lease_ms)
end
return out
