-- include queue
-- finish: commit the images of an attempt. ARGV: job id, attempt, measured seconds, images JSON, retention ms, image ids …
-- Returns ok, duplicate (this attempt had committed), canceled (a cancel came first) or fenced.
local id, attempt, seconds, images, retention = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4], tonumber(ARGV[5])
local MEMORY = 0.8 -- of the moving average of seconds per work unit: about the last ten jobs

local job = read_job(id)
if job and job.attempt == attempt then
  if job.state == 'completed' then return 'duplicate' end
  if job.state == 'canceled' then return 'canceled' end
end
if not is_held(job, attempt) then return fenced() end

release(job)
if job.cancel then
  end_canceled(job, retention)
  return 'canceled'
end

local function measure()
  local load = K('load:' .. job.kind)
  local measured = seconds / (math.max(job.work, 1) / 1000)
  local pace = tonumber(redis.call('HGET', load, 'pace'))
  pace = pace and MEMORY * pace + (1 - MEMORY) * measured or measured
  redis.call('HSET', load, 'pace', string.format('%.17g', pace))
end

measure()
charge(job.kind, job.account, (seconds - job.charge) / job.weight)
redis.call('HSET', K('job:' .. id), 'images', images, 'progress', 100, 'seconds', ARGV[3])
for i = 6, #ARGV do redis.call('SET', K('image:' .. ARGV[i]), id, 'PX', retention) end
end_job(job, 'completed', retention)
return 'ok'
