-- include end_attempt
-- args: job_id, attempt:number, seconds:number, result, marks, unread, retention_ms:number, image_ids:list
-- finish: commit the images of an attempt, which took `seconds` of one worker; `result` is all that readers need of it,
-- packed, `marks` how the images are marked, by spaces, and `unread` how many characters at the ends of prompt and
-- negative prompt the model did not read.
-- Returns ok, duplicate (this attempt had committed), canceled (a cancel came first), forbidden (the account may no
-- longer use the adapter: the job has failed) or fenced.
local SMOOTHING = 0.8 -- the share of its past that the average of seconds per work unit keeps: about the last ten jobs
-- The average of fully busy workers, whose passes are shared by most images, is near the lowest measured: it falls fast
-- and rises slowly, by these shares of the difference.
local BUSY_FALL, BUSY_RISE = 0.1, 0.0005
local USAGE_LIFE = 400 * DAY -- ms that a day's usage is kept: a year and a month to look back
local RECENT_ADAPTERS = 8192 -- completed jobs whose adapters are remembered, for workers that prefetch
local RECENT_LIFE = DAY
local LORA_USE_LIFE = 31 * DAY

local job = read_job(job_id)
local ended = end_attempt(job, attempt, {completed = 'duplicate'}, retention_ms)
if ended then return ended end
if not keeps_adapters(job) then
  end_forbidden(job, retention_ms)
  return 'forbidden'
end

local function measure_speed()
  local load = K('load:' .. job.pool)
  local measured = seconds / (math.max(job.work, 1) / 1000)
  local known = redis.call('HMGET', load, 'seconds_per_unit', 'busy_seconds_per_unit')
  local average = SMOOTHING * num(known[1], measured) + (1 - SMOOTHING) * measured
  local busy = num(known[2], measured)
  busy = busy + (measured < busy and BUSY_FALL or BUSY_RISE) * (measured - busy)
  redis.call('HSET', load, 'seconds_per_unit', string.format('%.17g', average),
    'busy_seconds_per_unit', string.format('%.17g', busy))
end

-- Count the usage of a job, which happens once, since only one of its attempts commits, and only once.
local function count_usage()
  if job.sample then return end -- the service drew it for itself
  local usage = K('usage:' .. job.account .. ':' .. math.floor(now / DAY))
  local source = job.key .. ':' .. (job.adapters[1] and table.concat(job.adapters, '+') or job.base or job.pool)
  add_to(usage, {'images:' .. source, #image_ids, 'work:' .. source, job.shown or job.work, 'ms:' .. source,
    math.floor(seconds * 1000 + 0.5)})
  redis.call('PEXPIRE', usage, USAGE_LIFE)
  local lora_use = K('lora_use:' .. math.floor(now / DAY))
  for _, adapter in ipairs(job.adapters) do redis.call('HINCRBY', lora_use, adapter, #image_ids) end
  redis.call('PEXPIRE', lora_use, LORA_USE_LIFE)
end

-- Remember the adapters of completed jobs only, each with the base model that its job names, if it does: an adapter that
-- ends its worker is never prefetched by others.
local function remember_adapters()
  if not job.adapters[1] then return end
  local recent, length = K('recent_adapters:' .. job.pool), 0
  for _, adapter in ipairs(job.adapters) do
    length = redis.call('LPUSH', recent, job.base and adapter .. ' ' .. job.base or adapter)
  end
  if length > RECENT_ADAPTERS then redis.call('LTRIM', recent, 0, RECENT_ADAPTERS - 1) end
  redis.call('PEXPIRE', recent, RECENT_LIFE)
end

measure_speed()
count_usage()
remember_adapters()
charge(job.pool, job.account, (seconds - job.charge) / job.queue_share)
local fields = packed_fields('r', result)
for name, value in pairs({marks = marks, unread = unread}) do
  if value ~= '' then
    fields[#fields + 1] = name
    fields[#fields + 1] = value
  end
end
for _, image_id in ipairs(image_ids) do redis.call('SET', K('image:' .. image_id), job_id, 'PX', retention_ms) end
end_job(job, 'completed', retention_ms, fields)
return 'ok'
