-- include listed_objects
-- args: job_id, account, first, uris, folder, bytes:number
-- Removal of what Redis holds of a job. Its objects are listed in the same script. `account` '' is the operator.
-- `first` is the first field of the result that the caller has read: while there is another, the call changes nothing.
-- `bytes` were counted at the accept.
local function has_changed() return (redis.call('HGET', K('job:' .. job_id), 'r0') or '') ~= first end

-- An ended job and its images. The first writes free memory, so that a full server can be emptied.
local function delete_record(job, image_ids)
  local name = K('job:' .. job.id)
  local idempotency = redis.call('HGET', name, 'idempotency')
  for _, index in ipairs({'recent', 'dead', 'jobs:' .. job.account}) do redis.call('ZREM', K(index), job.id) end
  for _, image_id in ipairs(image_ids) do redis.call('DEL', K('image:' .. image_id)) end
  if idempotency then
    local idempotency_key = K('idempotency:' .. job.account .. ':' .. job.variant .. ':' .. idempotency)
    if redis.call('HGET', idempotency_key, 'job') == job.id then redis.call('DEL', idempotency_key) end
  end
  count_stored(job, -bytes)
  list_objects(job.id, folder, uris)
  redis.call('DEL', name)
  for _, image_id in ipairs(job.pictures) do end_use(image_id, job.id) end
end
