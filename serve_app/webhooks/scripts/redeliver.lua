-- include jobs/webhooks
-- args: account, endpoint, message
-- redeliver: makes a delivery again, with the same id and the time of a new one. Returns its record, or {} where there is
-- none (any more), or its endpoint was deleted.
local delivery = delivery_of(account, endpoint, message)
if endpoint ~= 'jobs' and redis.call('EXISTS', K('webhook:' .. account .. ':' .. endpoint)) == 0 then return {} end
if redis.call('EXISTS', delivery) == 0 or redis.call('EXISTS', K('account:' .. account)) == 0 then return {} end
redis.call('HSET', delivery, 'state', 'waiting', 'tries', 0, 'until', now + WEBHOOK_TRIED)
redis.call('HDEL', delivery, 'status', 'error')
redis.call('PEXPIRE', delivery, WEBHOOK_LIFE)
redis.call('ZREM', K('webhook_log:' .. account .. ':' .. endpoint), message)
await_delivery(account, endpoint, message, now)
return redis.call('HGETALL', delivery)
