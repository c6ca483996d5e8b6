"""Short texts of programs that XLA compiled for GPUs and for TPUs, in the form that it writes them."""

# An all-gather of a weight runs beside a kernel; a loop of three rounds sums products over "model".
GPU = """\
HloModule jit_step, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }, entry_computation_layout=\
{(f32[256,128]{1,0}, f32[64,256]{1,0}, f32[256]{0})->(f32[256,128]{1,0}, f32[64,256]{1,0})}, num_partitions=8

FileNames
1 "/elsewhere/project/train.py"
2 "/elsewhere/project/layers.py"

FunctionNames
1 "step"
2 "layer"

FileLocations
1 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=4 end_column=9}
2 {file_name_id=2 function_name_id=2 line=7 end_line=7 column=4 end_column=9}
3 {file_name_id=2 function_name_id=2 line=9 end_line=9 column=4 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=1}
3 {file_location_id=3 parent_frame_id=1}

%add_f32 (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%fused_gelu (p0: f32[64,256], p1: f32[256]) -> f32[64,256] {
  %p0 = f32[64,256]{1,0} parameter(0)
  %p1 = f32[256]{0} parameter(1)
  %scale = f32[64,256]{1,0} broadcast(%p1), dimensions={1}, metadata={op_name="jit(step)/jvp(mlp)/mul" stack_frame_id=2}
  %product = f32[64,256]{1,0} multiply(%p0, %scale), metadata={op_name="jit(step)/jvp(mlp)/mul" stack_frame_id=2}
  ROOT %gelu = f32[64,256]{1,0} tanh(%product), metadata={op_name="jit(step)/jvp(mlp)/tanh" stack_frame_id=2}
}

%fused_dot (q0: f32[64,256], q1: f32[256,256]) -> f32[64,256] {
  %q0 = f32[64,256]{1,0} parameter(0)
  %q1 = f32[256,256]{1,0} parameter(1)
  ROOT %dot = f32[64,256]{1,0} dot(%q0, %q1), lhs_contracting_dims={1}, rhs_contracting_dims={0}, \
metadata={op_name="jit(step)/jvp(mlp)/dot_general" stack_frame_id=3}
}

%fused_update (u0: f32[256,128], u1: f32[64,256]) -> f32[256,128] {
  %u0 = f32[256,128]{1,0} parameter(0)
  %u1 = f32[64,256]{1,0} parameter(1)
  %part = f32[256,128]{1,0} reshape(%u1)
  ROOT %less = f32[256,128]{1,0} subtract(%u0, %part), metadata={op_name="jit(step)/sub" stack_frame_id=1}
}

%body (state: (s32[], f32[64,256], f32[256,256])) -> (s32[], f32[64,256], f32[256,256]) {
  %state = (s32[], f32[64,256]{1,0}, f32[256,256]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %h = f32[64,256]{1,0} get-tuple-element(%state), index=1
  %w = f32[256,256]{1,0} get-tuple-element(%state), index=2
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %gemm = f32[64,256]{1,0} fusion(%h, %w), kind=kCustom, calls=%fused_dot, metadata={op_name=\
"jit(step)/while/body/jvp(mlp)/dot_general" stack_frame_id=3}, backend_config={"native_emitter_backend_config":{}}
  %all-reduce.1 = f32[64,256]{1,0} all-reduce(%gemm), channel_id=2, replica_groups=mesh['data'=2,'model'=4] {'model'}, \
use_global_device_ids=true, to_apply=%add_f32, metadata={op_name="jit(step)/while/body/jvp(mlp)/dot_general" \
stack_frame_id=3}
  ROOT %carried = (s32[], f32[64,256]{1,0}, f32[256,256]{1,0}) tuple(%next, %all-reduce.1, %w)
}

%condition (state.1: (s32[], f32[64,256], f32[256,256])) -> pred[] {
  %state.1 = (s32[], f32[64,256]{1,0}, f32[256,256]{1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%state.1), index=0
  %three = s32[] constant(3)
  ROOT %less.1 = pred[] compare(%i.1, %three), direction=LT
}

ENTRY %main (param.0: f32[256,128], param.1: f32[64,256], param.2: f32[256]) -> (f32[256,128], f32[64,256]) {
  %param.0 = f32[256,128]{1,0} parameter(0), sharding={mesh['data'=2,'model'=4], [{}, {'data'}]}, \
metadata={op_name="params[\\'w\\']"}
  %param.1 = f32[64,256]{1,0} parameter(1), sharding={mesh['data'=2,'model'=4], [{'data'}, {}]}, \
metadata={op_name="x"}
  %param.2 = f32[256]{0} parameter(2), sharding={replicated}, metadata={op_name="params[\\'g\\']"}
  %zero = s32[] constant(0)
  %all-gather-start = ((f32[256,128]{1,0}), f32[256,256]{1,0}) all-gather-start(%param.0), channel_id=1, \
replica_groups=[4,2]<=[2,4]T(1,0), dimensions={1}, use_global_device_ids=true, metadata={op_name=\
"jit(step)/jvp(mlp)/dot_general" stack_frame_id=3}
  %gelu_fusion = f32[64,256]{1,0} fusion(%param.1, %param.2), kind=kLoop, calls=%fused_gelu
  %all-gather-done = f32[256,256]{1,0} all-gather-done(%all-gather-start), metadata={op_name=\
"jit(step)/jvp(mlp)/dot_general" stack_frame_id=3}
  %before = (s32[], f32[64,256]{1,0}, f32[256,256]{1,0}) tuple(%zero, %gelu_fusion, %all-gather-done)
  %while.1 = (s32[], f32[64,256]{1,0}, f32[256,256]{1,0}) while(%before), condition=%condition, body=%body, \
metadata={op_name="jit(step)/while" stack_frame_id=1}, backend_config={"known_trip_count":{"n":"3"}}
  %after = f32[64,256]{1,0} get-tuple-element(%while.1), index=1
  %update = f32[256,128]{1,0} fusion(%param.0, %after), kind=kLoop, calls=%fused_update
  ROOT %results = (f32[256,128]{1,0}, f32[64,256]{1,0}) tuple(%update, %after)
}
"""

# Two fusions carry one all-gather on; a sum runs over groups that lie along no axes; a shift goes round "model".
TPU = """\
HloModule jit_step, is_scheduled=true, entry_computation_layout={(bf16[128,64]{1,0:T(8,128)(2,1)}, \
f32[16,128]{1,0:T(8,128)})->f32[16,128]{1,0:T(8,128)}}, num_partitions=8

FileNames
1 "/elsewhere/project/train.py"

FunctionNames
1 "step"

FileLocations
1 {file_name_id=1 function_name_id=1 line=4 end_line=4 column=4 end_column=9}
2 {file_name_id=1 function_name_id=1 line=5 end_line=5 column=4 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=1}

%add_f32 (a: f32[], b: f32[]) -> f32[] {
  %a = f32[]{:T(128)} parameter(0)
  %b = f32[]{:T(128)} parameter(1)
  ROOT %sum = f32[]{:T(128)} add(%a, %b)
}

%starts (p0: bf16[128,64]) -> (bf16[128,64], bf16[128,128], u32[]) {
  %p0 = bf16[128,64]{1,0:T(8,128)(2,1)} parameter(0)
  %all-gather.1 = bf16[128,128]{1,0:T(8,128)(2,1)} all-gather(%p0), channel_id=1, replica_groups=[4,2]<=[2,4]T(1,0), \
dimensions={1}, use_global_device_ids=true, metadata={op_name="jit(step)/attn/dot_general" stack_frame_id=1}
  ROOT %started = (bf16[128,64]{1,0:T(8,128)(2,1)}, bf16[128,128]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) \
custom-call(%all-gather.1), custom_call_target="AsyncCollectiveStart"
}

%ends (d0: bf16[128,64], d1: bf16[128,128], d2: u32[]) -> bf16[128,128] {
  %d0 = bf16[128,64]{1,0:T(8,128)(2,1)} parameter(0)
  %d1 = bf16[128,128]{1,0:T(8,128)(2,1)} parameter(1)
  %d2 = u32[]{:S(2)} parameter(2)
  %all-gather.2 = bf16[128,128]{1,0:T(8,128)(2,1)} all-gather(%d0), channel_id=1, replica_groups=[4,2]<=[2,4]T(1,0), \
dimensions={1}, use_global_device_ids=true, metadata={op_name="jit(step)/attn/dot_general" stack_frame_id=1}
  ROOT %ended = bf16[128,128]{1,0:T(8,128)(2,1)} custom-call(%d0, %d1, %all-gather.2, %d2), \
custom_call_target="AsyncCollectiveDone"
}

%fused_double (f0: f32[16,128]) -> f32[16,128] {
  %f0 = f32[16,128]{1,0:T(8,128)} parameter(0)
  ROOT %double = f32[16,128]{1,0:T(8,128)} add(%f0, %f0), metadata={op_name="jit(step)/add" stack_frame_id=2}
}

%fused_product (g0: f32[16,128], g1: bf16[128,128]) -> f32[16,128] {
  %g0 = f32[16,128]{1,0:T(8,128)} parameter(0)
  %g1 = bf16[128,128]{1,0:T(8,128)(2,1)} parameter(1)
  ROOT %convolution = f32[16,128]{1,0:T(8,128)} convolution(%g0, %g1), dim_labels=bf_io->bf, metadata={op_name=\
"jit(step)/attn/dot_general" stack_frame_id=1}
}

ENTRY %main (param.0: bf16[128,64], param.1: f32[16,128]) -> f32[16,128] {
  %param.0 = bf16[128,64]{1,0:T(8,128)(2,1)} parameter(0), sharding={devices=[1,2,4]<=[8] last_tile_dim_replicate}, \
metadata={op_name="w"}
  %param.1 = f32[16,128]{1,0:T(8,128)} parameter(1), metadata={op_name="x"}
  %async-collective-start = (bf16[128,64]{1,0:T(8,128)(2,1)}, bf16[128,128]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) \
fusion(%param.0), kind=kCustom, calls=%starts, backend_config={"estimated_cycles":"10"}
  %sent = bf16[128,64]{1,0:T(8,128)(2,1)} get-tuple-element(%async-collective-start), index=0
  %room = bf16[128,128]{1,0:T(8,128)(2,1)} get-tuple-element(%async-collective-start), index=1
  %flag = u32[]{:S(2)} get-tuple-element(%async-collective-start), index=2
  %double_fusion = f32[16,128]{1,0:T(8,128)} fusion(%param.1), kind=kLoop, calls=%fused_double
  %async-collective-done = bf16[128,128]{1,0:T(8,128)(2,1)} fusion(%sent, %room, %flag), kind=kCustom, calls=%ends
  %product_fusion = f32[16,128]{1,0:T(8,128)} fusion(%double_fusion, %async-collective-done), kind=kOutput, \
calls=%fused_product, metadata={op_name="jit(step)/attn/dot_general" stack_frame_id=1}
  %all-reduce.1 = f32[16,128]{1,0:T(8,128)} all-reduce(%product_fusion), channel_id=2, \
replica_groups={{0,5},{1,4},{2,7},{3,6}}, use_global_device_ids=true, to_apply=%add_f32, metadata={op_name=\
"jit(step)/attn/dot_general" stack_frame_id=1}
  ROOT %collective-permute.1 = f32[16,128]{1,0:T(8,128)} collective-permute(%all-reduce.1), channel_id=3, \
source_target_pairs={{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}, metadata={op_name=\
"jit(step)/shard_map/ppermute" stack_frame_id=2}
}
"""
