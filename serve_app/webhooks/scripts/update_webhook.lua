-- args: account, endpoint, fields
-- update_webhook: changes fields of an endpoint's record; `fields` is JSON, in which `disabled` is true or false. Safe to
-- repeat. Returns the record; {} without such an endpoint.
local key, fields = K('webhook:' .. account .. ':' .. endpoint), cjson.decode(fields)
if redis.call('EXISTS', key) == 0 then return {} end
if fields.disabled == false then redis.call('HDEL', key, 'disabled') end
if fields.disabled then redis.call('HSETNX', key, 'disabled', now) end
fields.disabled = nil
for name, value in pairs(fields) do redis.call('HSET', key, name, value) end
return redis.call('HGETALL', key)
