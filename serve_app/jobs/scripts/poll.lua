-- include record
-- include accounts/window
-- include accounts/caller
-- args: job_id, job_interface
-- poll: key and record in one round trip; counts and writes nothing. `job_interface`: the one the job must be of, or
-- ''.
-- Returns {caller, snapshot}; the snapshot is empty for a job that is not the caller's: an unknown caller has no
-- account.
local caller = authenticate()
local job, row = read_record(job_id)
if not job or job.account ~= caller[2] or (job_interface ~= '' and job.variant ~= job_interface) then
  return {caller, {}}
end
return {caller, snapshot(job, row)}
