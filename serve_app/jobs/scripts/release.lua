-- include end_attempt
-- args: job_id, attempt:number, pause_ms:number, retention_ms:number
-- release: a worker that will not run a job returns it, after a pause, to its old place; the attempt does not count
-- against the cap. Returns requeued, canceled or fenced.
local job = read_job(job_id)
local ended = end_attempt(job, attempt, {queued = 'requeued'}, retention_ms)
if ended then return ended end
redis.call('HINCRBY', K('job:' .. job_id), 'tries', -1)
requeue(job)
if pause_ms > 0 then back_off(job, pause_ms) else enqueue(job) end
return 'requeued'
