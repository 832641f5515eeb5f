-- include listed_objects
-- include uploaded
-- args: image_id, account
-- delete_upload: remove the record of an image that the account uploaded, and list its objects. Returns the image's id,
-- or '' where the account has no such image (any more).
if was_deleted_by_this_call(image_id) then return image_id end
local name = K('upload:' .. image_id)
local record = redis.call('HMGET', name, 'account', 'day', 'counted')
if record[1] ~= account then return '' end
redis.call('DEL', name) -- the first write frees memory, so that a full server can be emptied
count_uploaded(account, record[2], -record[3])
list_objects(image_id, folder)
return image_id
