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
  local average = tonumber(redis.call('HGET', load, 'seconds_per_unit'))
  average = average and SMOOTHING * average + (1 - SMOOTHING) * measured or measured
  local busy = num(redis.call('HGET', load, 'busy_seconds_per_unit'), measured)
  busy = busy + (measured < busy and BUSY_FALL or BUSY_RISE) * (measured - busy)
  redis.call('HSET', load, 'seconds_per_unit', string.format('%.17g', average),
    'busy_seconds_per_unit', string.format('%.17g', busy))
end

-- Count the usage of a job, which happens once, since only one of its attempts commits, and only once.
local function count_usage()
  if redis.call('HGET', K('job:' .. job_id), 'sample') then return end -- the service drew it for itself
  local usage = K('usage:' .. job.account .. ':' .. math.floor(now / DAY))
  local key = redis.call('HGET', K('job:' .. job_id), 'key') or ''
  local source = key .. ':' .. (job.adapters[1] and table.concat(job.adapters, '+') or job.base or job.pool)
  redis.call('HINCRBY', usage, 'images:' .. source, #image_ids)
  redis.call('HINCRBY', usage, 'work:' .. source, num(redis.call('HGET', K('job:' .. job_id), 'shown'), job.work))
  redis.call('HINCRBY', usage, 'ms:' .. source, math.floor(seconds * 1000 + 0.5))
  redis.call('PEXPIRE', usage, USAGE_LIFE)
  local lora_use = K('lora_use:' .. math.floor(now / DAY))
  for _, adapter in ipairs(job.adapters) do redis.call('HINCRBY', lora_use, adapter, #image_ids) end
  redis.call('PEXPIRE', lora_use, LORA_USE_LIFE)
end

-- Remember the adapters of completed jobs only, each with the base model that its job names, if it does: an adapter that
-- ends its worker is never prefetched by others.
local function remember_adapters()
  if not job.adapters[1] then return end
  local recent = K('recent_adapters:' .. job.pool)
  for _, adapter in ipairs(job.adapters) do
    redis.call('LPUSH', recent, job.base and adapter .. ' ' .. job.base or adapter)
  end
  redis.call('LTRIM', recent, 0, RECENT_ADAPTERS - 1)
  redis.call('PEXPIRE', recent, RECENT_LIFE)
end

measure_speed()
count_usage()
remember_adapters()
charge(job.pool, job.account, (seconds - job.charge) / job.queue_share)
redis.call('HDEL', K('job:' .. job_id), 'progress') -- the state says that it is 100
redis.call('HSET', K('job:' .. job_id), unpack(packed_fields('r', result)))
if marks ~= '' then redis.call('HSET', K('job:' .. job_id), 'marks', marks) end
if unread ~= '' then redis.call('HSET', K('job:' .. job_id), 'unread', unread) end
for _, image_id in ipairs(image_ids) do redis.call('SET', K('image:' .. image_id), job_id, 'PX', retention_ms) end
end_job(job, 'completed', retention_ms)
return 'ok'
