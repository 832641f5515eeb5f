-- args: call
-- The list of objects that whoever comes next removes from the storage: a process that dies between a record's removal
-- and its objects' leaves them there. `folder` holds the objects, or is ''; `uris` (JSON) are objects wherever they
-- are. `call` names the call, whose repeat gets the same answer.
local function list_objects(name, folder, uris)
  redis.call('HSET', K('deletions'), name, cjson.encode({folder = folder, uris = uris, at = now, call = call}))
end

local function was_deleted_by_this_call(name)
  local listed = redis.call('HGET', K('deletions'), name)
  return listed and cjson.decode(listed).call == call
end
