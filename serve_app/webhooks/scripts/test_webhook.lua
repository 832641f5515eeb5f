-- include jobs/webhooks
-- args: account, endpoint, message
-- test_webhook: writes a delivery that tells of no job, to be tried once, whether or not the endpoint is disabled.
-- Repeating the call changes nothing. Returns the delivery; {} without such an endpoint.
local delivery = delivery_of(account, endpoint, message)
if redis.call('EXISTS', K('webhook:' .. account .. ':' .. endpoint)) == 0 then return {} end
if redis.call('EXISTS', delivery) == 0 then
  redis.call('HSET', delivery, 'job', '', 'state', 'waiting', 'ended', '', 'at', now, 'until', now)
  redis.call('PEXPIRE', delivery, WEBHOOK_LIFE)
  await_delivery(account, endpoint, message, now)
end
return redis.call('HGETALL', delivery)
