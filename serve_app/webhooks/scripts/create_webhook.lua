-- args: account, endpoint, url, events, base_url, given, salt, pepper:number, most:number
-- create_webhook: makes an endpoint of an account, which is told of `events` ('' for all). `base_url` is where its owner
-- finds this service; `given` tells what was asked for. Repeating the call changes nothing. Returns its record; {}
-- without such an account; {'full'} when the account has as many as it may have.
local key = K('webhook:' .. account .. ':' .. endpoint)
if redis.call('EXISTS', K('account:' .. account)) == 0 then return {} end
if redis.call('EXISTS', key) == 0 then
  if redis.call('ZCARD', K('webhooks:' .. account)) >= most then return {'full'} end
  redis.call('HSET', key, 'url', url, 'events', events, 'base_url', base_url, 'given', given, 'created', now,
    'salt', salt, 'pepper', pepper)
  redis.call('ZADD', K('webhooks:' .. account), now, endpoint)
end
return redis.call('HGETALL', key)
