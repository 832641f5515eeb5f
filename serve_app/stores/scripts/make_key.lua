-- include keys
-- make_key: a new API key. Repeating the call changes nothing.
-- ARGV: key id, digest, hint, account, name, interfaces, ms until it expires or ''. Returns the record; {} without such an account.
local id, account = ARGV[1], ARGV[4]
if redis.call('EXISTS', K('account:' .. account)) == 0 then return {} end
if redis.call('EXISTS', K('key:' .. id)) == 0 then
  write_key(id, ARGV[2], ARGV[3], account, ARGV[5], ARGV[6], tonumber(ARGV[7]))
end
return read_key(id)
