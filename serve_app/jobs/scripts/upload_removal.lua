-- include listed_objects
-- include uploaded
-- include image_uses

-- Remove an uploaded image, if it is there, and list its object. The first write frees memory.
local function remove_upload(image_id)
  local name = K('upload:' .. image_id)
  local account, day, counted, uri, sha256 =
    unpack(redis.call('HMGET', name, 'account', 'day', 'counted', 'uri', 'sha256'))
  redis.call('DEL', name, uses_of(image_id))
  redis.call('ZREM', K('uploads_due'), image_id)
  if not account then return end
  redis.call('ZREM', K('uploads:' .. account), image_id)
  count_uploaded(account, day, -counted)
  if redis.call('GET', upload_of(account, sha256)) == image_id then redis.call('DEL', upload_of(account, sha256)) end
  list_objects(image_id, string.match(uri, '(images/%w+/%d+/%d+/%d+/[%w_]+)/[^/]+$') or '', '[]')
end
