-- args: account, endpoint, base_url, salt, pepper:number, grace_ms:number
-- roll_webhook: gives an endpoint a new secret, and notes where its owner finds this service; the one before signs too for `grace_ms`. The endpoint `jobs`, which is
-- for the addresses that jobs name, exists once its secret was asked for. Repeating the call changes nothing. Returns
-- the record; {} without such an endpoint.
local key = K('webhook:' .. account .. ':' .. endpoint)
local was = redis.call('HMGET', key, 'salt', 'pepper')
if was[1] == salt then return redis.call('HGETALL', key) end
if was[1] then
  redis.call('HSET', key, 'old_salt', was[1], 'old_pepper', was[2], 'old_until', now + grace_ms)
elseif endpoint == 'jobs' and redis.call('EXISTS', K('account:' .. account)) == 1 then
  redis.call('HSET', key, 'url', '', 'created', now)
else
  return {}
end
redis.call('HSET', key, 'salt', salt, 'pepper', pepper, 'base_url', base_url)
return redis.call('HGETALL', key)
