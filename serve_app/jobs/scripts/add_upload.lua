-- include uploaded
-- args: image_id, account, record, counted:number, max_bytes:number, retention_ms:number
-- args: idempotency_digest, body_digest, idempotency_ms:number
-- add_upload: record an image that an account has uploaded, once its object is stored; `record` is JSON. It counts as
-- `counted` bytes. Repeating the call changes nothing. Returns {status, id}: added, replayed (an earlier call had this
-- key and body), conflict (it had another body), full (the account has no room for it), closed (there is no such
-- account, or it is disabled).
local name = K('upload:' .. image_id)
if redis.call('EXISTS', name) == 1 then return {'added', image_id} end
local owner = K('account:' .. account)
if redis.call('EXISTS', owner) == 0 or redis.call('HEXISTS', owner, 'disabled') == 1 then return {'closed', ''} end

local idempotency_key = K('idempotency:' .. account .. ':images:' .. idempotency_digest)
if idempotency_digest ~= '' then
  local previous = redis.call('HMGET', idempotency_key, 'image', 'body')
  if previous[1] and redis.call('EXISTS', K('upload:' .. previous[1])) == 1 then
    return {previous[2] == body_digest and 'replayed' or 'conflict', previous[1]}
  end
end
if bytes_uploaded(account) + counted > max_bytes then return {'full', ''} end

local expires = now + retention_ms
local day = math.floor(expires / DAY)
local fields = {'account', account, 'created', now, 'expires', expires, 'day', day, 'counted', counted}
for field, value in pairs(cjson.decode(record)) do
  fields[#fields + 1] = field
  fields[#fields + 1] = value
end
redis.call('HSET', name, unpack(fields))
redis.call('PEXPIRE', name, retention_ms)
count_uploaded(account, day, counted)
redis.call('PEXPIRE', K('uploaded:' .. account), retention_ms + DAY)
if idempotency_digest ~= '' then
  redis.call('HSET', idempotency_key, 'image', image_id, 'body', body_digest)
  redis.call('PEXPIRE', idempotency_key, idempotency_ms)
end
return {'added', image_id}
