-- include queue
-- args: job_id, attempt:number, pause_ms:number, retention_ms:number
-- release: a worker that will not run a job returns it, after a pause, to its old place; the attempt does not count against the
-- cap. Returns requeued, canceled or fenced.
local job = read_job(job_id)
if job and job.attempt == attempt then
  if job.state == 'queued' then return 'requeued' end
  if job.state == 'canceled' then return 'canceled' end
end
if not holds_lease(job, attempt) then return fenced() end
drop_lease(job)
if job.cancel then
  end_canceled(job, retention_ms)
  return 'canceled'
end
redis.call('HINCRBY', K('job:' .. job_id), 'tries', -1)
requeue(job)
if pause_ms > 0 then back_off(job, pause_ms) else enqueue(job) end
return 'requeued'
