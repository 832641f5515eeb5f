-- include queue
-- hand_back: a draining worker returns a job to its old place; the attempt does not count against the cap.
-- ARGV: job id, attempt, retention ms. Returns requeued, canceled or fenced.
local id, attempt, retention = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local job = read_job(id)
if job and job.attempt == attempt then
  if job.state == 'queued' then return 'requeued' end
  if job.state == 'canceled' then return 'canceled' end
end
if not is_held(job, attempt) then return fenced() end
release(job)
if job.cancel then
  end_canceled(job, retention)
  return 'canceled'
end
redis.call('HINCRBY', K('job:' .. id), 'tries', -1)
requeue(job)
put_in_queue(job)
return 'requeued'
