-- include record
-- include accounts/window
-- include accounts/caller
-- args: job_id, job_interface
-- poll: key and record in one round trip; counts and writes nothing. `job_interface`: the one the job must be of, or
-- ''.
-- Returns {caller, snapshot}; the snapshot is empty for a job that is not the caller's: an unknown caller has no
-- account.

-- What interfaces A and B show of a record, and the parts of most results; they leave the request out.
local SHOWN = {'state', 'kind', 'account', 'variant', 'created', 'waiting_since', 'work', 'charge', 'progress',
  'attempt', 'started', 'finished', 'key', 'code', 'message', 'marks', 'unread', 'r0', 'r1', 'r2', 'r3'}

local function read_shown()
  local row, job = {}, {id = job_id}
  for i, value in ipairs(redis.call('HMGET', K('job:' .. job_id), unpack(SHOWN))) do
    if value then job[SHOWN[i]], row[#row + 1], row[#row + 2] = value, SHOWN[i], value end
  end
  if job.r3 then return read_record(job_id) end -- there may be more parts
  return job.state and job, row
end

local caller = authenticate()
local job, row = (job_interface == '' and read_record or read_shown)(job_id)
if not job or job.account ~= caller[2] or (job_interface ~= '' and job.variant ~= job_interface) then
  return {caller, {}}
end
return {caller, snapshot(job, row)}
