-- include queue
-- include deletion
-- args: image_id, rest
-- delete_image: remove one image of a completed job. `rest` is the packed result without it; where it is '', the job
-- goes too.
-- Returns the name of the objects on the list, 'changed' (read the job again), the id of another job that has not ended
-- and needs the image, or '' when the account has no such job (any more).
for _, name in ipairs({image_id, job_id}) do
  if was_deleted_by_this_call(name) then return name end
end
local job = read_job(job_id)
if not job or (account ~= '' and job.account ~= account) then return '' end
if has_changed() then return 'changed' end
local user = account ~= '' and unfinished_user({image_id})
if user then return user end
if rest == '' then
  delete_record(job, {image_id})
  return job_id
end
redis.call('DEL', K('image:' .. image_id))
list_objects(image_id, '', uris)
local number = 0
while redis.call('HDEL', K('job:' .. job_id), 'r' .. number) == 1 do number = number + 1 end
redis.call('HSET', K('job:' .. job_id), unpack(packed_fields('r', rest)))
return image_id
