-- include queue
-- include caller
-- poll: key and record in one round trip; counts and writes nothing.
-- ARGV: as in caller.lua, without a receipt; then job id, the interface it must be of or ''.
-- Returns {caller, snapshot}; the snapshot is empty for a job that is not the caller's: an unknown one has no account.
local id, variant = ARGV[#ARGV - 1], ARGV[#ARGV]
local who, job = caller(), read_job(id)
if not job or job.account ~= who[2] or (variant ~= '' and job.variant ~= variant) then return {who, {}} end
return {who, snapshot(id)}
