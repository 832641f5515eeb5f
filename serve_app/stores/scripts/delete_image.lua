-- include queue
-- include deletion
-- args: image_id
-- delete_image: one image of a completed job; with its last image the job goes, too.
-- Returns the name of the objects on the list, or '' when the account has no such job or the job no such image (any more).
for _, name in ipairs({image_id, job_id}) do
  if was_deleted_by_this_call(name) then return name end
end
local job = read_job(job_id)
if not job or (account ~= '' and job.account ~= account) then return '' end
local images = read_images(redis.call('HGET', K('job:' .. job_id), 'images'))
local deleted, kept = nil, {}
for _, image in ipairs(images or {}) do
  if image.image_id == image_id then deleted = image else kept[#kept + 1] = image end
end
if not deleted then return '' end
if #kept == 0 then
  delete_record(job, folder)
  return job_id
end
redis.call('DEL', K('image:' .. image_id))
list_objects(image_id, '', cjson.encode({deleted}))
redis.call('HSET', K('job:' .. job_id), 'images', cjson.encode(kept))
return image_id
