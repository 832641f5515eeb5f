-- include queue
-- What finish, fail and release begin with, by which a worker ends its attempt.

-- Return the answer to a call that is repeated, comes too late or after a cancel, which it carries out; nil where the
-- attempt held its lease, which is given up here. `repeated` has the answers by the states in which a first such call
-- left the job.
local function end_attempt(job, attempt, repeated, retention_ms)
  if job and job.attempt == attempt then
    if repeated[job.state] then return repeated[job.state] end
    if job.state == 'canceled' then return 'canceled' end
  end
  if not holds_lease(job, attempt) then return fenced() end
  drop_lease(job)
  if not job.cancel then return nil end
  end_canceled(job, retention_ms)
  return 'canceled'
end
