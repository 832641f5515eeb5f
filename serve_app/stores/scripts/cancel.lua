-- include queue
-- cancel: a waiting job ends at once; a running one at its next beat. ARGV: job id, account or '' (the operator), retention ms
-- Returns the job's state after the call, or '' when there is no such job of the account.
local id, account, retention = ARGV[1], ARGV[2], tonumber(ARGV[3])
local job = read_job(id)
if not job or (account ~= '' and job.account ~= account) then return '' end
if job.state == 'queued' then
  stop_waiting(job)
  end_canceled(job, retention)
  return 'canceled'
end
if job.state == 'running' then redis.call('HSETNX', K('job:' .. id), 'cancel', now) end
return job.state
