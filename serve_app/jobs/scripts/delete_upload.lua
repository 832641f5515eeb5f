-- include upload_removal
-- args: image_id, account
-- delete_upload: remove an image that the account uploaded, and list its object. Returns the image's id, that of a job
-- that has not ended and needs it, or '' where the account has no such image (any more).
if was_deleted_by_this_call(image_id) then return image_id end
if redis.call('HGET', K('upload:' .. image_id), 'account') ~= account then return '' end
local user = unfinished_user({image_id})
if user then return user end
remove_upload(image_id)
return image_id
