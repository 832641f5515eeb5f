-- include record
-- args: lease_ms:number, permitted_at:number, attempts:list
-- heartbeat: extend the leases of a worker's attempts, store the progress of each, learn of cancels. `attempts`: the id
-- of each one's job, its number and its progress. `permitted_at`: the revision of LoRAs at which all accounts could use
-- their adapters. Heartbeats go on when the server is full. Returns the revision now, and of each ok, cancel, forbidden
-- (its account may no longer use its adapter) or fenced.
local revision = num(redis.call('GET', K('loras_revision')), 0)
local seen = {} -- workers by pool: a worker has one

local function see(job)
  if seen[job.pool] ~= job.worker then redis.call('ZADD', K('workers:' .. job.pool), now, job.worker) end
  seen[job.pool] = job.worker
  local quarantine_worker = K('quarantine_worker:' .. job.pool)
  if job.losses >= QUARANTINE_LOSSES and redis.call('GET', quarantine_worker) == job.worker then
    redis.call('PEXPIRE', quarantine_worker, lease_ms)
  end
end

local function extend(id, attempt, progress)
  local field = redis.call('HMGET', K('job:' .. id), 'state', 'attempt', 'kind', 'worker', 'account', 'cancel',
    'progress', 'losses', 'adapter', 'more_adapters')
  local job = {state = field[1], attempt = num(field[2], 0), pool = field[3], worker = field[4], account = field[5],
    losses = num(field[8], 0), adapters = lines_of(field[9], field[10])}
  if not holds_lease(job, attempt) then return fenced() end
  call_also_when_full('ZADD', K('lease:' .. job.pool), now + lease_ms, id)
  see(job)
  local shown = math.min(progress, 99)
  if shown > num(field[7], -1) then redis.call('HSET', K('job:' .. id), 'progress', shown) end
  if field[6] then return 'cancel' end
  return (revision == permitted_at or keeps_adapters(job)) and 'ok' or 'forbidden'
end

local answer = {revision}
for i = 1, #attempts, 3 do
  answer[#answer + 1] = extend(attempts[i], tonumber(attempts[i + 1]), tonumber(attempts[i + 2]))
end
return answer
