#pragma once

namespace parlat {

// Tensors of torch's meta device have shapes and no values. From the first call on, in this process, their storage is
// reported to memory meters like any other, and the operations that libtorch lacks there (Python has them) exist: code
// that runs on them allocates what it would allocate on the CPU, and nothing really.
void prepare_meta_device();

}  // namespace parlat
