-- include end_attempt
-- args: job_id, attempt:number, code, message, retry:flag, max_attempts:number
-- args: first_pause_ms:number, max_pause_ms:number, jitter:number, retention_ms:number
-- fail: an attempt ended without images. It is tried again after a pause, or the job has failed and is a dead letter.
-- Returns ok (failed for good), requeued, canceled, duplicate or fenced.
local job = read_job(job_id)
local ended = end_attempt(job, attempt, {failed = 'duplicate', queued = 'requeued'}, retention_ms)
if ended then return ended end
if not retry or job.tries >= max_attempts then
  end_failed(job, code, message, retention_ms)
  return 'ok'
end
requeue(job)
back_off(job, math.min(max_pause_ms, first_pause_ms * 2 ^ (job.tries - 1)) * jitter)
return 'requeued'
