-- args: variant, account, max_queued:number, max_unfinished:number, max_stored:number, job_bytes:number
-- args: index_ms:number, version:number, key_id, plan, request_id
-- What `accept.lua` and `accept_all.lua` share: whether there is space for more jobs, and how one is written.

local over = {} -- days whose stored bytes no longer count

local function stored_bytes()
  local bytes, days, oldest = 0, redis.call('HGETALL', stored_of(account, variant)), math.floor((now - index_ms) / DAY)
  for i = 1, #days, 2 do
    if tonumber(days[i]) < oldest then over[#over + 1] = days[i] else bytes = bytes + days[i + 1] end
  end
  return bytes
end

-- full, account_full or account_stored where so many more jobs are too many; else nil.
local function no_space(more)
  local waiting = more - 1
  for _, each in ipairs(pools()) do waiting = waiting + redis.call('ZCARD', K('age:' .. each)) end
  if waiting >= max_queued then return 'full' end
  if more - 1 + num(redis.call('HGET', K('unfinished'), account), 0) >= max_unfinished then return 'account_full' end
  if stored_bytes() >= (max_stored or math.huge) then return 'account_stored' end
end

-- Return what the answer says of a job's LoRA: its base model, and its trigger words as JSON.
local function lora_facts(adapter)
  if adapter == '' then return {'', ''} end
  local found = redis.call('HMGET', K('lora:' .. adapter), 'base_model', 'trigger_words')
  return {found[1] or '', found[2] or ''}
end

-- Write a job and return its record; what is '' or nil of it has no field. The catalog says of its base model which pool
-- takes it, and how often a step asks the denoiser, unless the LoRA has a sampler of its own.
local function write_job(job)
  local model = job.adapter ~= '' and base_model_of(job.adapter)
  if model then
    job.kind = pool_of(model)
    local own = redis.call('HGET', K('lora:' .. job.adapter), 'passes')
    job.work = job.work * (tonumber(own or '') or model.passes or 1)
  end
  local fields = packed_fields('', job.request)
  for name, value in pairs({
    version = version, state = 'queued', kind = job.kind, variant = variant, account = account, group = job.group,
    work = job.work, queue_share = job.queue_share, num_images = job.num_images, created = now, waiting_since = now,
    sequence = redis.call('INCR', K('job_sequence')), rate_token = job.rate_token, adapter = job.adapter, plan = plan,
    sample = job.sample and 1 or nil, request_id = request_id, traceparent = job.traceparent, key = key_id,
    idempotency = job.idempotency,
  }) do
    if value ~= '' then
      fields[#fields + 1] = name
      fields[#fields + 1] = value
    end
  end
  redis.call('HSET', K('job:' .. job.id), unpack(fields))
  redis.call('HINCRBY', K('unfinished'), account, 1)
  redis.call('HINCRBY', K('load:' .. job.kind), 'work', job.work)
  redis.call('HINCRBY', K('load:' .. job.kind), 'accepted_work', job.work)
  redis.call('HINCRBY', K('count'), 'accepted', 1)
  local written = read_job(job.id)
  enqueue(written)
  count_stored(written, job_bytes + #job.request)
  if #over > 0 then redis.call('HDEL', stored_of(account, variant), unpack(over)) end
  redis.call('PEXPIRE', stored_of(account, variant), index_ms + DAY)

  local account_jobs = K('jobs:' .. account)
  redis.call('ZADD', account_jobs, now, job.id)
  redis.call('ZREMRANGEBYSCORE', account_jobs, '-inf', now - index_ms)
  redis.call('PEXPIRE', account_jobs, index_ms)
  redis.call('ZADD', K('recent'), now, job.id)
  redis.call('ZREMRANGEBYRANK', K('recent'), 0, -RECENT - 1)
  return written
end
