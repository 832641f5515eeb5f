-- include queue
-- reap: whatever time has run out on: leases, pauses, jobs that waited too long, workers not seen, old dead letters.
-- ARGV: limit per list, attempts allowed, queue age ms, retention ms, worker life ms. Returns how many jobs moved.
local limit, allowed, age_limit = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local retention, worker_life = tonumber(ARGV[4]), tonumber(ARGV[5])

local function lose_lease(job)
  if job.cancel then
    end_canceled(job, retention)
  elseif job.tries < allowed then
    job.losses = redis.call('HINCRBY', K('job:' .. job.id), 'losses', 1)
    requeue(job)
    put_in_queue(job)
  else
    end_failed(job, 'generation_failed', 'the job was lost with its worker too many times', retention)
  end
end

local function expire(job)
  stop_waiting(job)
  redis.call('HSET', K('job:' .. job.id), 'code', 'expired', 'message', 'the job waited longer than the limit')
  give_back_request(job)
  end_job(job, 'expired', retention)
end

local function run_out_of_lease(kind)
  local over = redis.call('ZRANGEBYSCORE', K('lease:' .. kind), '-inf', now, 'LIMIT', 0, limit)
  for _, id in ipairs(over) do
    redis.call('ZREM', K('lease:' .. kind), id)
    local job = read_job(id)
    if job and job.state == 'running' then
      release(job)
      lose_lease(job)
    end
  end
  return #over
end

local function run_out_of_patience(kind)
  local over = redis.call('ZRANGEBYSCORE', K('age:' .. kind), '-inf', now - age_limit, 'LIMIT', 0, limit)
  for _, id in ipairs(over) do
    redis.call('ZREM', K('age:' .. kind), id)
    local job = read_job(id)
    if job and job.state == 'queued' then expire(job) end
  end
  return #over
end

local function forget_workers(kind)
  local gone = redis.call('ZRANGEBYSCORE', K('workers:' .. kind), '-inf', now - worker_life, 'LIMIT', 0, limit)
  for _, worker in ipairs(gone) do
    redis.call('ZREM', K('workers:' .. kind), worker)
    redis.call('HDEL', K('room:' .. kind), worker)
  end
end

local moved = 0
for _, kind in ipairs(KINDS) do
  moved = moved + run_out_of_lease(kind) + promote_due(kind, limit) + run_out_of_patience(kind)
  forget_workers(kind)
end
redis.call('ZREMRANGEBYSCORE', K('dead'), '-inf', now - retention)
return moved
