-- include uploaded
-- include image_uses
-- args: image_id, account, record, counted:number, max_bytes:number, retention_ms:number, user, lasts_ms:number
-- args: idempotency_digest, body_digest, idempotency_ms:number
-- add_upload: record an image that an account brings, before its object is stored; `record` is JSON. It counts as
-- `counted` bytes, and `user` needs it for `lasts_ms`: the call that brings it, or `kept` once its object is stored,
-- which the idempotency key stands for from then on. Repeating the call changes nothing. Returns {status, id}: added,
-- known (the account has the same picture), replayed (an earlier call had this key and body), conflict (another body),
-- full (the account has no room for it), closed (there is no such account, or it is disabled), gone (it was deleted).
local idempotency_key = K('idempotency:' .. account .. ':images:' .. idempotency_digest)
local function used(status, id)
  use_image(id, user, now + lasts_ms, lasts_ms)
  if user == 'kept' then
    redis.call('HSET', K('upload:' .. id), 'expires', now + lasts_ms)
    if idempotency_digest ~= '' then
      redis.call('HSET', idempotency_key, 'image', id, 'body', body_digest)
      redis.call('PEXPIRE', idempotency_key, idempotency_ms)
    end
  end
  return {status, id}
end
if redis.call('EXISTS', K('upload:' .. image_id)) == 1 then return used('added', image_id) end
if user == 'kept' then return {'gone', image_id} end
local owner = K('account:' .. account)
if redis.call('EXISTS', owner) == 0 or redis.call('HEXISTS', owner, 'disabled') == 1 then return {'closed', ''} end

if idempotency_digest ~= '' then
  local previous = redis.call('HMGET', idempotency_key, 'image', 'body')
  if previous[1] and redis.call('EXISTS', K('upload:' .. previous[1])) == 1 then
    return {previous[2] == body_digest and 'replayed' or 'conflict', previous[1]}
  end
end
local fields = cjson.decode(record)
local known = redis.call('GET', upload_of(account, fields.sha256))
if known and redis.call('EXISTS', K('upload:' .. known)) == 1 then return used('known', known) end
if bytes_uploaded(account) + counted > max_bytes then return {'full', ''} end

local cells = {'account', account, 'created', now, 'expires', now + retention_ms}
fields.day, fields.counted = UNTIL_REMOVED, counted
for field, value in pairs(fields) do
  cells[#cells + 1] = field
  cells[#cells + 1] = value
end
redis.call('HSET', K('upload:' .. image_id), unpack(cells))
index_upload(image_id, account, fields.sha256, now, now + lasts_ms)
count_uploaded(account, UNTIL_REMOVED, counted)
return used('added', image_id)
