-- include queue
-- args: limit:number, max_attempts:number, queue_age_ms:number, retention_ms:number, worker_life_ms:number
-- reap: end what is over: leases, pauses, jobs that waited too long, workers not seen, old dead letters, waiting jobs
-- of LoRAs that were withdrawn; and move those that are to wait in another pool; `limit` in all. Returns how many were
-- looked at: below `limit`, nothing is left.
local left = limit

-- What is due of an index by time, as many as are left to be looked at.
local function due_of(index, latest)
  local due = redis.call('ZRANGEBYSCORE', index, '-inf', latest, 'LIMIT', 0, left)
  left = left - #due
  return due
end

local function lose_lease(job)
  if job.cancel then
    end_canceled(job, retention_ms)
  elseif job.tries < max_attempts then
    job.losses = redis.call('HINCRBY', K('job:' .. job.id), 'losses', 1)
    requeue(job)
    enqueue(job)
  else
    end_failed(job, 'generation_failed', 'the job was lost with its worker too many times', retention_ms)
  end
end

local function expire(job)
  remove_waiting(job)
  refund_request(job)
  end_job(job, 'expired', retention_ms)
end

local function reap_leases(pool)
  for _, id in ipairs(due_of(K('lease:' .. pool), now)) do
    redis.call('ZREM', K('lease:' .. pool), id)
    local job = read_job(id)
    if job and job.state == 'running' then
      drop_lease(job)
      redis.call('HINCRBY', K('count'), 'lease_expired', 1)
      lose_lease(job)
    end
  end
end

-- End the jobs of an index, by its pool, whose time there was over by `latest` (ms).
local function expire_waiting(index, latest)
  for _, id in ipairs(due_of(index, latest)) do
    redis.call('ZREM', index, id)
    local job = read_job(id)
    if job and job.state == 'queued' then expire(job) end
  end
end

local function remove_dead_workers(pool)
  for _, worker in ipairs(due_of(K('workers:' .. pool), now - worker_life_ms)) do
    redis.call('ZREM', K('workers:' .. pool), worker)
    redis.call('HDEL', K('capacity:' .. pool), worker)
    redis.call('HDEL', K('gauges:' .. pool), worker)
  end
end

-- Take a waiting job to the pool that the catalog wants it in now; one that backs off goes on doing so.
local function move_to_wanted_pool(job)
  if wanted_pool(job) == job.pool then return end
  local due = redis.call('ZSCORE', K('delay:' .. job.pool), job.id)
  remove_waiting(job)
  change_pool(job)
  if due then back_off(job, due - now) else enqueue(job) end
end

-- The next waiting jobs of a LoRA that somebody may no longer use, or whose base model is in another group now, after
-- those that were looked at before.
local function end_waiting(lora, looked_at, most)
  local after = '(' .. looked_at
  local waiting = redis.call('ZRANGEBYSCORE', waiting_of(lora), after, '+inf', 'WITHSCORES', 'LIMIT', 0, most)
  for i = 1, #waiting, 2 do
    local job = read_job(waiting[i])
    if not job or job.state ~= 'queued' then -- claimed by a version that does not know the index
      redis.call('ZREM', waiting_of(lora), waiting[i])
    elseif not keeps_adapters(job) then
      remove_waiting(job)
      end_forbidden(job, retention_ms)
    else
      move_to_wanted_pool(job)
    end
  end
  return #waiting / 2, waiting[#waiting]
end

local function end_withdrawn()
  while left > 0 do
    local next_lora = redis.call('ZRANGE', K('loras_withdrawn'), 0, 0, 'WITHSCORES')
    if not next_lora[1] then break end
    local most = left
    local removed, found, last = string.match(next_lora[1], '^granted:(.+)$'), nil, next_lora[2]
    if removed then
      found = forget_grants(removed, most)
    else
      found, last = end_waiting(next_lora[1], next_lora[2], most)
    end
    if found == most then
      redis.call('ZADD', K('loras_withdrawn'), last, next_lora[1])
    else
      redis.call('ZREM', K('loras_withdrawn'), next_lora[1])
    end
    left = left - math.max(1, found)
  end
end

-- Forget a pool that the catalog no longer names once it has neither jobs nor workers.
local function forget_pools()
  local is_named = {generation = true, upscale = true}
  for _, model in ipairs(base_models()) do is_named[pool_of(model)] = true end
  for _, pool in ipairs(pools()) do
    if not is_named[pool] and redis.call('EXISTS', K('age:' .. pool), K('lease:' .. pool), K('workers:' .. pool)) == 0 then
      redis.call('SREM', K('pools'), pool)
      redis.call('DEL', K('load:' .. pool), K('global_vtime:' .. pool), K('idle_vtime:' .. pool))
    end
  end
end

for _, pool in ipairs(pools()) do
  reap_leases(pool)
  left = left - promote_due(pool, left)
  expire_waiting(K('age:' .. pool), now - queue_age_ms)
  expire_waiting(K('start_by:' .. pool), now)
  remove_dead_workers(pool)
end
forget_pools()
redis.call('ZREMRANGEBYSCORE', K('dead'), '-inf', now - retention_ms)
end_withdrawn() -- it comes last: on a full server, its writes are allowed after one that frees memory
return limit - left
