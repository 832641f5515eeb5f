-- include queue
-- include deletion
-- args: force:flag, image_ids:list
-- delete_job: afterwards the job was never there; `force` ends an unfinished one first.
-- Returns the name of its objects on the list, 'unfinished', 'changed' (read it again), the id of another job that has
-- not ended and needs one of its images, or '' when the account has no such job (any more).
if was_deleted_by_this_call(job_id) then return job_id end
local job = read_job(job_id)
if not job or (account ~= '' and job.account ~= account) then return '' end
if has_changed() then return 'changed' end
if job.state == 'queued' or job.state == 'running' then
  if not force then return 'unfinished' end
  if job.state == 'queued' then remove_waiting(job) else drop_lease(job) end
  end_canceled(job, 1000)
end
local user = account ~= '' and not force and unfinished_user(image_ids)
if user then return user end
delete_record(job, image_ids)
return job_id
