-- include queue
-- fail: an attempt came to nothing. It is tried again after a pause, or the job has failed and is a dead letter.
-- ARGV: job id, attempt, code, message, retry ('1' or '0'), attempts allowed, first pause ms, longest pause ms, jitter, retention ms
-- Returns ok (failed for good), requeued, canceled, duplicate or fenced.
local id, attempt, code, message, retry = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4], ARGV[5] == '1'
local allowed, first, longest, jitter = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9])
local retention = tonumber(ARGV[10])

local job = read_job(id)
if job and job.attempt == attempt then
  if job.state == 'failed' then return 'duplicate' end
  if job.state == 'canceled' then return 'canceled' end
  if job.state == 'queued' then return 'requeued' end
end
if not is_held(job, attempt) then return fenced() end

release(job)
if job.cancel then
  end_canceled(job, retention)
  return 'canceled'
end
if not retry or job.tries >= allowed then
  end_failed(job, code, message, retention)
  return 'ok'
end
local pause = math.min(longest, first * 2 ^ (job.tries - 1)) * jitter
requeue(job)
redis.call('ZADD', K('delay:' .. job.kind), math.floor(now + pause), id)
redis.call('ZADD', K('age:' .. job.kind), job.since, id)
return 'requeued'
