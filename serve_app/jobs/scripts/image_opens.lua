-- args: name
-- image_opens: 1 while the images of a job, or the uploaded image, of this id may be opened by their addresses: its
-- record exists and its account is not disabled.
local account = redis.call('HGET', K('job:' .. name), 'account') or redis.call('HGET', K('upload:' .. name), 'account')
if not account or redis.call('HEXISTS', K('account:' .. account), 'disabled') == 1 then return 0 end
return 1
