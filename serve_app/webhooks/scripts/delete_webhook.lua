-- args: account, endpoint
-- delete_webhook: removes an endpoint with the list of its deliveries; those that wait end at their next attempt. Safe to
-- repeat.
redis.call('ZREM', K('webhooks:' .. account), endpoint)
redis.call('DEL', K('webhook:' .. account .. ':' .. endpoint), K('webhook_log:' .. account .. ':' .. endpoint))
return 1
