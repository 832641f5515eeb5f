-- args: job_id
-- image_opens: 1 while a job's images may be opened by their addresses: its record exists and its account is not
-- disabled.
local account = redis.call('HGET', K('job:' .. job_id), 'account')
if not account or redis.call('HEXISTS', K('account:' .. account), 'disabled') == 1 then return 0 end
return 1
