-- include upload_removal
-- args: limit:number, pause_ms:number
-- remove_due_uploads: remove uploads that nothing needs any more, of `limit` that are due. One that is needed is due
-- again when that ends, or after a pause where nobody knows when. Returns how many were looked at.
write_also_when_full()
local due = redis.call('ZRANGEBYSCORE', K('uploads_due'), '-inf', now, 'LIMIT', 0, limit)
for _, image_id in ipairs(due) do
  local ends = needed_until(image_id)
  if ends > now and redis.call('EXISTS', K('upload:' .. image_id)) == 1 then
    if ends == math.huge then ends = now + pause_ms else redis.call('HSET', K('upload:' .. image_id), 'expires', ends) end
    redis.call('ZADD', K('uploads_due'), ends, image_id)
  else
    remove_upload(image_id)
  end
end
return #due
