-- include queue
-- include repeats
-- args: new, idempotency_ms:number, max_queued:number, max_unfinished:number, max_stored:number, job_bytes:number
-- args: index_ms:number, version:number, key_id, plan, request_id
-- accept: every check first, then every write: after this script the job exists whole, or not at all. `new`: JSON, as
-- `write_job` takes a job. Its account must be allowed to use its `loras`, whose digests become the job's `weights`; a
-- job without LoRAs names these itself. A repeated call has the same job id. `key_id` is the API key that asked, or '';
-- `plan` its interface and plan, or ''; `request_id` that of the HTTP request, for logs, or ''.
-- Returns {status, snapshot, {base model, trigger words of each LoRA}}; status: ok, forbidden, replay, conflict,
-- no_image, full, account_full, account_stored.
local new = cjson.decode(new)
local over = {} -- days whose stored bytes no longer count

local function stored_bytes()
  local bytes, days, oldest = 0, redis.call('HGETALL', stored_of(account, variant)), math.floor((now - index_ms) / DAY)
  for i = 1, #days, 2 do
    if tonumber(days[i]) < oldest then over[#over + 1] = days[i] else bytes = bytes + days[i + 1] end
  end
  return bytes
end

-- full, account_full or account_stored where one more job is too many; else nil.
local function no_space()
  local waiting = 0
  for _, each in ipairs(pools()) do waiting = waiting + redis.call('ZCARD', K('age:' .. each)) end
  if waiting >= max_queued then return 'full' end
  if num(redis.call('HGET', K('unfinished'), account), 0) >= max_unfinished then return 'account_full' end
  if stored_bytes() >= (max_stored or math.huge) then return 'account_stored' end
end

-- Return what batches call LoRAs together, each {id, weight as Python writes it}: the digest of a single one, what
-- `as_one` (serve_app/engine/run.py) makes of several, or '' for none.
local function weights_of(loras)
  local parts = {}
  for i, lora in ipairs(loras) do
    parts[i] = {digest = lora_of(lora[1]).sha256, weight = lora[2]}
  end
  if #parts < 2 then return parts[1] and parts[1].digest or '' end
  table.sort(parts, function(a, b)
    if a.digest ~= b.digest then return a.digest < b.digest end
    return tonumber(a.weight) < tonumber(b.weight)
  end)
  for i, part in ipairs(parts) do parts[i] = part.digest .. '*' .. part.weight end
  return table.concat(parts, '+')
end

-- Return how many times the rows of a guided job count, by the part of its steps that the first LoRA, or else the base
-- model, says has guidance: two rows there, and one elsewhere.
local function guided_share(lora, model)
  local said = (lora.guidance_start or lora.guidance_end) and lora or model
  return (1 + num(said.guidance_end, 1) - num(said.guidance_start, 0)) / 2
end

-- Write a job and return its fields in a row; what is '' or nil of it has none. The catalog says of its base model
-- which pool takes it, by which of its `prices` it counts, and how often a step asks the denoiser, unless the job
-- (`cost`) or its LoRA says it. Its owner is told the work without price: `shown`, where that differs.
local function write_job(job)
  local adapters = {}
  for i, lora in ipairs(job.loras) do adapters[i] = lora[1] end
  job.weights = adapters[1] and weights_of(job.loras) or job.weights or ''
  local first = adapters[1] and lora_of(adapters[1]) or {}
  local model = base_model_of({adapters = adapters, base = job.base or first.base_model})
  if model then
    job.pool = pool_of(model)
    local price = job.prices and (job.prices[model.pipeline or ''] or job.prices['']) or {job.work, 0}
    local cost = job.cost or num(first.passes, model.passes or 1) * (1 + num(first.added_cost, 0))
    if job.guided then cost = cost * guided_share(first, model) end
    local priced = math.floor(price[1] * cost + price[2] + 0.5)
    if priced ~= job.work then job.shown, job.work = job.work, priced end
  end
  job.sequence = redis.call('INCR', K('job_sequence')) + (job.low_priority and LOW_PRIORITY or 0)
  job.state, job.kind, job.variant, job.account, job.plan = 'queued', job.pool, variant, account, plan
  job.adapters, job.pictures, job.attempt, job.losses = adapters, job.pictures or {}, 0, 0
  job.created, job.waiting_since, job.start_by = now, now, job.start_within_ms and now + job.start_within_ms
  local fields = packed_fields('', job.request)
  for _, cell in ipairs(packed_fields('w', job.webhook or '')) do fields[#fields + 1] = cell end
  for name, value in pairs({
    version = version, state = job.state, kind = job.pool, variant = variant, account = account, group = job.weights,
    work = job.work, shown = job.shown, queue_share = job.queue_share, num_images = job.num_images,
    created = now, waiting_since = now,
    sequence = job.sequence, rate_token = job.rate_token, adapter = adapters[1], plan = plan,
    more_adapters = table.concat(adapters, '\n', 2), base = job.base, start_by = job.start_by,
    sample = job.sample and 1 or nil, request_id = request_id, traceparent = job.traceparent, key = key_id,
    idempotency = job.idempotency, pictures = table.concat(job.pictures, '\n'),
  }) do
    if value ~= '' then
      fields[#fields + 1] = name
      fields[#fields + 1] = type(value) == 'number' and string.format('%.17g', value) or value
    end
  end
  redis.call('HSET', K('job:' .. job.id), unpack(fields))
  redis.call('HINCRBY', K('unfinished'), account, 1)
  redis.call('HINCRBY', K('count'), 'accepted', 1)
  begin_uses(job)
  enqueue(job, {'work', job.work, 'accepted_work', job.work})
  count_stored(job, job_bytes + #job.request)
  if #over > 0 then redis.call('HDEL', stored_of(account, variant), unpack(over)) end
  redis.call('PEXPIRE', stored_of(account, variant), index_ms + DAY)

  local account_jobs = K('jobs:' .. account)
  redis.call('ZADD', account_jobs, now, job.id)
  redis.call('ZREMRANGEBYSCORE', account_jobs, '-inf', now - index_ms)
  redis.call('PEXPIRE', account_jobs, index_ms)
  redis.call('ZADD', K('recent'), now, job.id)
  redis.call('ZREMRANGEBYRANK', K('recent'), 0, -RECENT - 1)
  return fields
end

-- the same call again, because its reply was lost: the caller made the id, so it is the caller's own job
if redis.call('EXISTS', K('job:' .. new.id)) == 1 then
  return {'ok', snapshot(read_record(new.id)), lora_facts(new.loras, new.base)}
end
local answer = forbidden_or_repeat(new.loras, new.base)
if answer then return answer end

for _, image_id in ipairs(new.pictures or {}) do
  if redis.call('EXISTS', K('upload:' .. image_id), K('image:' .. image_id)) == 0 then return {'no_image', {}, {}} end
end
local full = no_space()
if full then return {full, {}, {}} end

new.idempotency = idempotency_digest -- kept, so that deleting the job deletes its idempotency key
local fields = write_job(new)
if idempotency_digest ~= '' then
  redis.call('HSET', idempotency_key, 'job', new.id, 'given', given_digest, 'body', body_digest)
  redis.call('PEXPIRE', idempotency_key, idempotency_ms)
end
return {'ok', snapshot(new, fields), lora_facts(new.loras, new.base)}
