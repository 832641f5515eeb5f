-- include queue
-- args: job_id, account, retention_ms:number
-- cancel: a waiting job ends at once; a running one at its next heartbeat. `account` '' is the operator.
-- Returns the job's state after the call, or '' when the account has no such job.
local job = read_job(job_id)
if not job or (account ~= '' and job.account ~= account) then return '' end
if job.state == 'queued' then
  remove_waiting(job)
  end_canceled(job, retention_ms)
  return 'canceled'
end
if job.state == 'running' then
  write_also_when_full()
  redis.call('HSETNX', K('job:' .. job_id), 'cancel', now)
end
return job.state
