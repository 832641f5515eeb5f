-- args: job_id, account, folder, call
-- Removal of what Redis holds of a job. Its objects are listed in `deletions` in the same script, for whoever removes them next:
-- a process that dies between the two leaves them on the list. `account` '' is the operator; `folder` holds the job's objects;
-- `call` names the call, whose repeat gets the same answer.
local function list_objects(name, folder, images)
  redis.call('HSET', K('deletions'), name, cjson.encode({folder = folder, images = images, at = now, call = call}))
end

local function was_deleted_by_this_call(name)
  local listed = redis.call('HGET', K('deletions'), name)
  return listed and cjson.decode(listed).call == call
end

-- The job's images as a table, or nil where they cannot be read.
local function read_images(text)
  local is_read, images = pcall(cjson.decode, text or '[]')
  if is_read and type(images) == 'table' then return images end
end

-- An ended job. The first writes free memory, so that a full server can be emptied.
local function delete_record(job, folder)
  local name = K('job:' .. job.id)
  local stored = redis.call('HMGET', name, 'images', 'idempotency')
  for _, index in ipairs({'recent', 'dead', 'uncompacted', 'jobs:' .. job.account}) do redis.call('ZREM', K(index), job.id) end
  for _, image in ipairs(read_images(stored[1]) or {}) do redis.call('DEL', K('image:' .. tostring(image.image_id))) end
  if stored[2] then
    local idempotency_key = K('idempotency:' .. job.account .. ':' .. job.variant .. ':' .. stored[2])
    if redis.call('HGET', idempotency_key, 'job') == job.id then redis.call('DEL', idempotency_key) end
  end
  list_objects(job.id, folder, stored[1] or '[]')
  redis.call('DEL', name)
end
